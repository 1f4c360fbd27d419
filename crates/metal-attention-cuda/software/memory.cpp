// Device memory, which is memory of this process. Each allocation is filled with NaN at first and has guard bytes around it,
// which are checked when it is freed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <mutex>

#include "driver.hpp"

static constexpr size_t GUARD = 1024; // bytes before and after an allocation
static constexpr size_t ALIGNMENT = 256;
static constexpr unsigned char NOT_WRITTEN = 0xff, GUARD_BYTE = 0xa5;

// An allocation: its size, and its number in the order of allocations.
struct Allocation {
    size_t bytes;
    unsigned number;
};
static std::mutex mutex;
static size_t n_allocated;
static unsigned n_allocations;
static std::map<uint64_t, Allocation>& allocations() {
    static auto* all = new std::map<uint64_t, Allocation>;
    return *all;
}
static size_t total_bytes() { return (size_t)software::setting("SOFTWARE_CUDA_MEMORY_MIB", 8192) << 20; }

// Ends the process if a guard byte has changed.
static void check_guards(uint64_t address, const Allocation& allocation) {
    const auto* p = (const unsigned char*)address;
    for (size_t i = 0; i < GUARD; i++) {
        const bool before = p[-1 - (ptrdiff_t)i] != GUARD_BYTE, after = p[allocation.bytes + i] != GUARD_BYTE;
        if (!before && !after) continue;
        fprintf(stderr, "software CUDA device: a kernel wrote %zu bytes %s of allocation %u of memory, which has %zu bytes\n", i + before,
                before ? "before the begin" : "after the end", allocation.number, allocation.bytes);
        abort();
    }
}

// Whether the range lies within one allocation.
static bool is_inside(uint64_t address, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = allocations().upper_bound(address);
    if (after == allocations().begin()) return false;
    --after;
    const uint64_t at = address - after->first;
    return at <= after->second.bytes && bytes <= after->second.bytes - at;
}

DRIVER cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    const std::lock_guard<std::mutex> lock(mutex);
    static const long most = software::setting("SOFTWARE_CUDA_ALLOCATIONS", -1);
    if (most >= 0 && n_allocations >= (unsigned long)most) return OUT_OF_MEMORY;
    if (bytes > total_bytes() || n_allocated > total_bytes() - bytes) return OUT_OF_MEMORY;
    const size_t all = (GUARD + bytes + GUARD + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto* p = (unsigned char*)aligned_alloc(ALIGNMENT, all);
    if (!p) return OUT_OF_MEMORY;
    memset(p, GUARD_BYTE, GUARD);
    memset(p + GUARD, NOT_WRITTEN, bytes);
    memset(p + GUARD + bytes, GUARD_BYTE, all - GUARD - bytes);
    *address = (uint64_t)(p + GUARD);
    allocations()[*address] = {bytes, n_allocations++};
    n_allocated += bytes;
    return SUCCESS;
}

DRIVER cuMemFree_v2(uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations().find(address);
    if (found == allocations().end()) return INVALID_VALUE;
    check_guards(address, found->second);
    n_allocated -= found->second.bytes;
    // Freed memory is filled with NaN, so that later uses are noticed.
    memset((void*)address, NOT_WRITTEN, found->second.bytes);
    allocations().erase(found);
    free((unsigned char*)address - GUARD);
    return SUCCESS;
}

DRIVER cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    const std::lock_guard<std::mutex> lock(mutex);
    *total = total_bytes();
    *free_bytes = *total - n_allocated;
    return SUCCESS;
}

DRIVER cuMemHostAlloc(void** p, size_t bytes, unsigned) {
    *p = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    return *p ? SUCCESS : OUT_OF_MEMORY;
}
DRIVER cuMemFreeHost(void* p) {
    free(p);
    return SUCCESS;
}

DRIVER cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* stream) {
    if (!is_inside(to, bytes)) return INVALID_VALUE;
    return submit(stream, [=] { return memcpy((void*)to, from, bytes), SUCCESS; });
}
DRIVER cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* stream) {
    if (!is_inside(from, bytes)) return INVALID_VALUE;
    return submit(stream, [=] { return memcpy(to, (const void*)from, bytes), SUCCESS; });
}
DRIVER cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* stream) {
    if (!is_inside(to, bytes) || !is_inside(from, bytes)) return INVALID_VALUE;
    return submit(stream, [=] { return memmove((void*)to, (const void*)from, bytes), SUCCESS; });
}
DRIVER cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, Stream* stream) {
    if (!is_inside(to, n)) return INVALID_VALUE;
    return submit(stream, [=] { return memset((void*)to, value, n), SUCCESS; });
}
DRIVER cuMemsetD32Async(uint64_t to, unsigned value, size_t n, Stream* stream) {
    if (to % 4 || n > SIZE_MAX / 4 || !is_inside(to, 4 * n)) return INVALID_VALUE;
    return submit(stream, [=] {
        for (size_t i = 0; i < n; i++) ((unsigned*)to)[i] = value;
        return SUCCESS;
    });
}
DRIVER cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) { return cuMemcpyHtoDAsync_v2(to, from, bytes, nullptr); }
DRIVER cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) { return cuMemcpyDtoHAsync_v2(to, from, bytes, nullptr); }
