// All packed matrices of a model, one after the other in one piece of memory, and as the contents of a file.
//
// One piece, because the system can then back it with huge pages: a step reads every weight once, and with small pages
// it spends a tenth of its time on finding them.
//
// A file is read, not mapped. Pages of a file are small ones, somebody who cuts the file short would kill the process
// with SIGBUS, and what was checked would be the file, which may change afterwards, not the numbers that are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "formats.h"
#include "threads.h"

namespace chairlift {

class WeightImage {
public:
    // Throws std::bad_alloc.
    explicit WeightImage(std::size_t bytes = 0);

    std::size_t size() const { return memory_->size(); }
    std::uint8_t* at(std::size_t offset) const { return memory_->data() + offset; }
    const std::shared_ptr<AlignedBuffer>& memory() const { return memory_; }

    // Tells whether two images are the same, against faults and accidents, not against somebody who means harm: any
    // change within one word is found with certainty, others but for one in 2^64. Runs on the pool.
    std::uint64_t checksum(ThreadPool& pool) const;

    // Fills the image from byte `offset` of a file on, and returns whether all of it is there and has this checksum.
    // Each piece is added up while it is still in the cache of the processor that read it. Runs on the pool.
    bool read(int file, std::uint64_t offset, std::uint64_t checksum, ThreadPool& pool);

private:
    std::shared_ptr<AlignedBuffer> memory_;
};

}  // namespace chairlift
