// `Block`, the state in which an operating system thread runs blocks, one after the other.
#pragma once
#include <atomic>

#include "software_block.hpp"

namespace software {

constexpr uint32_t MAX_THREADS = 1024; // of a block
constexpr int BARRIERS = 16;
constexpr size_t MAX_SHARED = 227 << 10;
constexpr size_t GUARD = 1024; // bytes after shared memory that are checked for writes

// A barrier of the block: number of threads that have arrived, number that it waits for (0: all), and the waiting fibers.
struct Barrier {
    uint32_t n, wanted;
    Fiber* waiting[MAX_THREADS];
};

// A bulk copy to shared memory, and the mbarrier that counts its bytes.
struct BulkCopy {
    Copy copy;
    uint64_t* barrier;
};

struct Block {
    const Launch* launch;
    const std::atomic<bool>* launch_failed; // whether any block of the launch has failed
    uint32_t n_threads, n_live;
    Fiber* ready[MAX_THREADS]; // a ring of fibers that can run
    uint32_t ready_begin, ready_end;
    Fiber* polling[MAX_THREADS]; // fibers that called pause(); they continue when no other fiber can run
    uint32_t n_polling;
    bool all_poll;         // whether no other fiber has become ready since the last call of poll_again()
    uint32_t n_idle;       // calls of poll_again() since any other fiber became ready
    uint64_t waits_since;  // the time in seconds since when all fibers poll
    void* caller;   // the stack of the thread that runs the block
    const char* failure;
    char failure_text[160];
    Index failed_thread;
    Barrier barriers[BARRIERS];
    std::vector<BulkCopy> bulk_copies;
    Fiber* fibers[MAX_THREADS]; // created for the blocks so far
    Place place;
    Warp warps[MAX_THREADS / 32];

    Block();
    Block(const Block&) = delete;
    // The fiber of thread `i`. It is created for the first block with so many threads.
    Fiber& fiber(uint32_t i);
    // The shared memory of a new block, filled with NaN.
    unsigned char* begin_shared(size_t bytes);
    bool shared_is_intact(size_t bytes) const;

  private:
    unsigned char* shared;
    uintptr_t stacks;
};

// Runs block `index` to its end. Returns why it failed, or null.
const char* run_block(Block& block, const Launch& launch, Index index);

}  // namespace software
