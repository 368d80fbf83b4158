// A persistent team of threads for one caller.
//
// A model step runs inside one run(), with barriers between its phases, so that a phase costs about a microsecond to
// start and not a wake-up. Waiting threads spin for a few tens of microseconds and then sleep, so that an idle or
// descheduled team does not starve another process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace chairlift {

class ThreadPool {
public:
    // `threads` >= 1 counts the caller of run(). The others are pinned to one processor each if the pool takes every
    // processor this process may use; with fewer threads the kernel places them better than a fixed choice would.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread, 0 being the caller, and returns when all have returned. `body` must not
    // throw. One run() at a time; not from within a run().
    template <class Body>
    void run(Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        dispatch([](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
                 const_cast<void*>(static_cast<const void*>(&body)));
    }

    // Within run(), called by every thread: returns when all have arrived. What a thread wrote before is visible to
    // all after.
    void barrier();

    // Within run(): takes the next `count` units of the loop the threads share and returns the first of them; the
    // caller stops when that is past its end. The loop starts again at 0 at each barrier() and run(), so there is one
    // such loop between two barriers.
    std::int64_t claim(std::int64_t count) { return next_unit_.fetch_add(count, std::memory_order_relaxed); }

    // body(begin, end) for pieces of [0, total) of `grain` units, over all threads; within run(), no barrier inside.
    template <class Body>
    void for_each_piece(std::int64_t total, std::int64_t grain, Body&& body) {
        for (std::int64_t begin = claim(grain); begin < total; begin = claim(grain))
            body(begin, begin + grain < total ? begin + grain : total);
    }

private:
    void stop();  // ends and joins the workers
    using Function = void (*)(void* context, int thread);

    void dispatch(Function function, void* context);
    void worker(int thread);
    void wait_while(std::atomic<std::uint32_t>& word, std::uint32_t value) const;

    int size_;
    bool spins_;  // before going to sleep; not if there are fewer processors than threads
    Function function_ = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
    // Each on its own cache line: they are written by different threads at different times.
    alignas(64) std::atomic<std::uint32_t> epoch_{0};       // changes at each run()
    alignas(64) std::atomic<std::uint32_t> generation_{0};  // changes at each completed barrier
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<std::int64_t> next_unit_{0};
};

}  // namespace chairlift
