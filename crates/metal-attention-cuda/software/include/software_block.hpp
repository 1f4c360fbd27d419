// How a block runs on a CPU: each of its threads is a fiber, a function with its own stack. All fibers of a block share one
// operating system thread, which switches to another fiber when one must wait.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <vector>

namespace software {

struct Index {
    unsigned x, y, z;
};

// A warp-wide operation. The last of the lanes `arrived` (a mask) calls it once; `given` has a pointer from each of them.
typedef void Perform(void* const (&given)[32], uint32_t arrived);

// Lanes of a warp that wait for each other in one operation.
struct Meeting {
    uint32_t mask, arrived;
    Perform* perform;
    void* given[32];
};

struct Fiber;
constexpr int MEETINGS = 4;
struct Warp {
    uint32_t live; // lanes that have not returned
    Fiber* lanes[32];
    Meeting meetings[MEETINGS];
};

// An asynchronous copy to shared memory. `zeros`: zeros are written instead.
struct Copy {
    void* to;
    const void* from;
    uint32_t bytes;
    bool zeros;
};
// The copies of a thread in order, and the end of each committed group.
struct Copies {
    std::vector<Copy> copies;
    std::vector<size_t> groups;
    size_t n_copied, n_groups_copied;
};

// The values that all threads of a block share.
struct Place {
    Index block_index, block_size, grid_size;
    unsigned char* shared_memory;
};

struct Block;
// A thread of a block.
struct Fiber {
    void* stack_pointer;
    Index thread;
    uint32_t lane;
    const Place* place;
    Warp* warp;
    Block* block;
    const char* waits_for;
    Copies copies;
};

// A fiber's stack begins at a multiple of its size. It consists of the `Fiber` itself, at one of several offsets, so that
// fibers do not compete for the same cache sets; a guard page; and the stack proper.
constexpr uintptr_t STACK = 128 << 10, PAGE = 4096;
constexpr uintptr_t PLACES = 16;
static_assert(sizeof(Fiber) <= PAGE / PLACES);
inline Fiber* fiber_of_stack(uintptr_t inside) {
    const uintptr_t begin = inside & ~(STACK - 1);
    return (Fiber*)(begin + begin / STACK % PLACES * (PAGE / PLACES));
}
// The current fiber.
inline Fiber* fiber() {
    uintptr_t inside;
#if defined(__x86_64__)
    asm("movq %%rsp, %0" : "=r"(inside));
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(inside));
#else
#error "fibers are written for x86-64 and aarch64"
#endif
    return fiber_of_stack(inside);
}

// Waits until all lanes of `mask` that have not returned have arrived, and performs the operation. `what` names it in
// messages.
void meet(uint32_t mask, const char* what, Perform* perform, void* given);
// Waits for `n_threads` threads at barrier `id`; 0: all threads of the block that have not returned.
void block_barrier(unsigned id, unsigned n_threads);
// Counts the current thread at the barrier without waiting.
void block_arrive(unsigned id, unsigned n_threads);
// Lets other fibers of the block run, and other blocks when no other fiber can.
void pause();
// Fails the kernel with an error.
[[noreturn]] void fail(const char* why);

// Asynchronous copies (cp.async): starts one, commits a group, waits until at most `but_last_groups` groups are unfinished.
void copy_later(void* to, const void* from, uint32_t bytes, bool zeros);
void commit_copies();
void finish_copies(size_t but_last_groups);

// mbarriers in shared memory, and the bulk copies that they count.
void barrier_init(uint64_t* barrier, uint32_t count);
void barrier_arrive(uint64_t* barrier, uint32_t expected_bytes);
bool barrier_ended(uint64_t* barrier, uint32_t phase);
void copy_for_barrier(void* to, const void* from, uint32_t bytes, uint64_t* barrier);

// A kernel; `run` calls it with its argument structure.
struct Kernel {
    const char* name;
    size_t argument_bytes;
    void (*run)(const void* argument);
};

template <typename Argument> constexpr size_t argument_size(void (*)(Argument)) { return sizeof(Argument); }
// Whether a kernel takes an `Args`.
template <typename Args, typename Argument> constexpr bool takes(void (*)(Argument)) {
    return std::is_same<typename std::remove_const<Argument>::type, Args>::value;
}
template <auto KERNEL> struct Call;
template <typename Argument, void (*KERNEL)(Argument)> struct Call<KERNEL> {
    static void run(const void* argument) { KERNEL(*(const Argument*)argument); }
};
#define SOFTWARE_KERNEL(NAME, FUNCTION) {NAME, software::argument_size(FUNCTION), software::Call<FUNCTION>::run}

// Registers the kernels of a file when the library is loaded.
struct Kernels {
    Kernels(const Kernel* kernels, size_t n);
};

// A kernel launch.
struct Launch {
    const Kernel* kernel;
    Index grid, block;
    uint32_t shared_bytes;
    bool cooperative; // all blocks run at the same time
    std::vector<unsigned char> argument;
};
// Runs all blocks. Returns false if one of them failed; the reason has been printed.
bool run(const Launch& launch);
const Kernel* find_kernel(const char* name);

// The number in the environment variable `name`; `otherwise` if it is not set.
long setting(const char* name, long otherwise);

}  // namespace software
