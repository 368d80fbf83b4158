#include "threads.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace chairlift {
namespace {

// Long enough for the next phase of a step to begin, short against a scheduler's time slice.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerClockRead = 32;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The processors this process may use; empty if the system does not tell.
std::vector<int> allowed_processors() {
    std::vector<int> found;
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
#endif
    return found;
}

void pin(std::thread& thread, int processor) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a hint: running anywhere is correct as well
#else
    (void)thread, (void)processor;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : size_(threads) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads must be from 1 to 1024, got " + std::to_string(threads));
    const std::vector<int> processors = allowed_processors();
    const int usable = processors.empty() ? static_cast<int>(std::thread::hardware_concurrency())
                                          : static_cast<int>(processors.size());
    spins_ = threads <= usable;
    try {
        for (int i = 1; i < threads; i++) {
            workers_.emplace_back(&ThreadPool::worker, this, i);
            if (threads == static_cast<int>(processors.size())) pin(workers_.back(), processors[i]);
        }
    } catch (const std::system_error&) {  // those that run must end before this object goes
        stop();
        throw std::runtime_error("the system gives only " + std::to_string(workers_.size() + 1) + " of " +
                                 std::to_string(threads) + " threads; lower --threads");
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stopping_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::dispatch(Function function, void* context) {
    function_ = function;
    context_ = context;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    function(context, 0);
    barrier();
}

void ThreadPool::worker(int thread) {
    for (std::uint32_t seen = 0;; seen++) {
        wait_while(epoch_, seen);
        if (stopping_) return;
        function_(context_, thread);
        barrier();
    }
}

void ThreadPool::barrier() {
    // Cannot change before this thread has arrived.
    const std::uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return wait_while(generation_, generation);
    arrived_.store(0, std::memory_order_relaxed);
    next_unit_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    generation_.notify_all();
}

void ThreadPool::wait_while(std::atomic<std::uint32_t>& word, std::uint32_t value) const {
    if (spins_) {
        const auto start = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < kPausesPerClockRead; i++) {
                if (word.load(std::memory_order_acquire) != value) return;
                pause();
            }
        } while (std::chrono::steady_clock::now() - start < kSpinTime);
    }
    word.wait(value, std::memory_order_acquire);
}

}  // namespace chairlift
