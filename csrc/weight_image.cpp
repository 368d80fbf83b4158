#include "weight_image.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <vector>

namespace chairlift {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;  // fits the second cache; what a thread reads and adds up at once
constexpr int kLanes = 8;                             // independent chains, for the processor to work on at once

// Every step is a bijection of the sum as well as of the word, so that no change of one word is lost.
std::uint64_t add(std::uint64_t sum, std::uint64_t word) {
    sum = (sum ^ word) * 0x9FB21C651E98DF25u;
    return sum ^ sum >> 32;
}

std::uint64_t add_up(std::span<const std::uint8_t> bytes) {
    std::uint64_t lanes[kLanes] = {};
    std::size_t at = 0;
    for (; at + sizeof lanes <= bytes.size(); at += sizeof lanes) {
        std::uint64_t words[kLanes];
        std::memcpy(words, bytes.data() + at, sizeof words);
        for (int i = 0; i < kLanes; i++) lanes[i] = add(lanes[i], words[i]);
    }
    std::uint64_t sum = bytes.size();
    for (std::uint64_t lane : lanes) sum = add(sum, lane);
    for (; at < bytes.size(); at++) sum = add(sum, bytes[at]);
    return sum;
}

bool read_piece(int file, std::uint64_t offset, std::span<std::uint8_t> out) {
    for (std::size_t done = 0; done < out.size();) {
        const ssize_t count = pread(file, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
        if (count > 0) {
            done += static_cast<std::size_t>(count);
        } else if (count == 0 || errno != EINTR) {
            return false;
        }
    }
    return true;
}

// prepare(offset, piece) of each piece, then its sum; the sum of the sums.
template <class Prepare>
std::uint64_t add_up_pieces(const AlignedBuffer& memory, ThreadPool& pool, Prepare&& prepare) {
    std::vector<std::uint64_t> sums((memory.size() + kPiece - 1) / kPiece);
    pool.run([&](int) {
        pool.for_each_piece(static_cast<std::int64_t>(sums.size()), 1, [&](std::int64_t piece, std::int64_t) {
            const std::size_t offset = piece * kPiece;
            const std::span bytes(memory.data() + offset, std::min(kPiece, memory.size() - offset));
            prepare(offset, bytes);
            sums[piece] = add_up(bytes);
        });
    });
    return add_up({reinterpret_cast<const std::uint8_t*>(sums.data()), sums.size() * sizeof sums[0]});
}

}  // namespace

WeightImage::WeightImage(std::size_t bytes) : memory_(std::make_shared<AlignedBuffer>(bytes)) {
    ask_for_huge_pages(*memory_);
}

std::uint64_t WeightImage::checksum(ThreadPool& pool) const {
    return add_up_pieces(*memory_, pool, [](std::size_t, std::span<std::uint8_t>) {});
}

bool WeightImage::read(int file, std::uint64_t offset, std::uint64_t checksum, ThreadPool& pool) {
    std::atomic<bool> whole = true;
    const std::uint64_t found = add_up_pieces(*memory_, pool, [&](std::size_t at, std::span<std::uint8_t> piece) {
        if (!read_piece(file, offset + at, piece)) whole = false;
    });
    return whole && found == checksum;
}

}  // namespace chairlift
