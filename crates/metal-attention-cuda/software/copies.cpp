// Asynchronous copies from global to shared memory, and mbarriers. Copies are done as late as possible, when a thread waits
// for them, so that a missing wait is found. With SOFTWARE_CUDA_EARLY_COPIES=1 they are done at once, so that memory that is
// overwritten too early is found.
#include <string.h>

#include "software_run.hpp"

namespace software {

static void perform(const Copy& copy) {
    if (copy.zeros) memset(copy.to, 0, copy.bytes);
    else memcpy(copy.to, copy.from, copy.bytes);
}
static bool early() {
    static const bool early = setting("SOFTWARE_CUDA_EARLY_COPIES", 0) != 0;
    return early;
}

void copy_later(void* to, const void* from, uint32_t bytes, bool zeros) {
    if ((uintptr_t)to % bytes || (!zeros && (uintptr_t)from % bytes)) fail("a copy to workgroup memory is not aligned");
    const Copy copy = {to, from, bytes, zeros};
    if (early()) perform(copy);
    else fiber()->copies.copies.push_back(copy);
}

void commit_copies() {
    Copies& c = fiber()->copies;
    c.groups.push_back(c.copies.size());
}

void finish_copies(size_t but_last_groups) {
    Copies& c = fiber()->copies;
    while (c.groups.size() - c.n_groups_copied > but_last_groups) {
        const size_t end = c.groups[c.n_groups_copied++];
        for (; c.n_copied < end; c.n_copied++) perform(c.copies[c.n_copied]);
    }
    if (c.n_groups_copied == c.groups.size() && c.n_copied == c.copies.size()) {
        c.copies.clear(), c.groups.clear();
        c.n_copied = c.n_groups_copied = 0;
    } else if (c.n_copied > 4096) {
        c.copies.erase(c.copies.begin(), c.copies.begin() + (ptrdiff_t)c.n_copied);
        c.groups.erase(c.groups.begin(), c.groups.begin() + (ptrdiff_t)c.n_groups_copied);
        for (size_t& end : c.groups) end -= c.n_copied;
        c.n_copied = c.n_groups_copied = 0;
    }
}

// The contents of an mbarrier, in its 64 bits.
struct BarrierState {
    int32_t bytes;      // still missing in this phase
    uint16_t missing;   // arrivals still missing in this phase
    uint16_t count : 15, phase : 1;
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t));

static BarrierState read(const uint64_t* barrier) {
    BarrierState state;
    memcpy(&state, barrier, sizeof state);
    return state;
}
static void write(uint64_t* barrier, BarrierState state) {
    if (state.missing == 0 && state.bytes == 0) {
        state.phase ^= 1;
        state.missing = state.count;
    }
    memcpy(barrier, &state, sizeof state);
}

void barrier_init(uint64_t* barrier, uint32_t count) {
    if (count == 0 || count >= 1 << 15) fail("a barrier for no threads, or for too many");
    const BarrierState state = {0, (uint16_t)count, (uint16_t)count, 0};
    memcpy(barrier, &state, sizeof state);
}

void barrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
    BarrierState state = read(barrier);
    if (state.missing == 0 || state.missing > state.count) fail("more threads arrive at a barrier than it is for");
    state.missing--;
    state.bytes += (int32_t)expected_bytes;
    write(barrier, state);
}

static void copy_counted(const Copy& copy, uint64_t* barrier) {
    perform(copy);
    BarrierState state = read(barrier);
    state.bytes -= (int32_t)copy.bytes;
    write(barrier, state);
}

bool barrier_ended(uint64_t* barrier, uint32_t phase) {
    std::vector<BulkCopy>& copies = fiber()->block->bulk_copies;
    if (read(barrier).phase == phase) {
        // A thread waits, so that the copies which this barrier counts are done now.
        size_t rest = 0;
        for (size_t i = 0; i < copies.size(); i++) {
            if (copies[i].barrier == barrier) copy_counted(copies[i].copy, barrier);
            else copies[rest++] = copies[i];
        }
        copies.resize(rest);
    }
    return read(barrier).phase != phase;
}

void copy_for_barrier(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) fail("a copy of many bytes is not aligned");
    const Copy copy = {to, from, bytes, false};
    if (early()) copy_counted(copy, barrier);
    else fiber()->block->bulk_copies.push_back({copy, barrier});
}

}  // namespace software
