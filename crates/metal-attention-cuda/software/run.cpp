// Kernel launches: runs the blocks of a grid on operating system threads. Each thread has a `Block`, in which it runs one
// block after the other.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "software_run.hpp"

namespace software {

constexpr unsigned char NOT_WRITTEN = 0xff, GUARD_BYTE = 0xa5;

// Anonymous memory, filled with zeros.
static unsigned char* map(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "software CUDA device: no memory for stacks\n");
        abort();
    }
    return (unsigned char*)p;
}

Block::Block() : launch(nullptr), launch_failed(nullptr), failure(nullptr), fibers{}, warps{} {
    stacks = ((uintptr_t)map((MAX_THREADS + 1) * STACK) + STACK - 1) & ~(STACK - 1);
    shared = map(MAX_SHARED + GUARD);
}
Fiber& Block::fiber(uint32_t i) {
    if (!fibers[i]) {
        fibers[i] = new (fiber_of_stack(stacks + i * STACK)) Fiber{};
        // A guard page. The system allows a process some ten thousand mappings of this kind.
        mprotect((void*)(stacks + i * STACK + PAGE), PAGE, PROT_NONE);
    }
    return *fibers[i];
}
unsigned char* Block::begin_shared(size_t bytes) {
    memset(shared, NOT_WRITTEN, bytes);
    memset(shared + bytes, GUARD_BYTE, GUARD);
    return shared;
}
bool Block::shared_is_intact(size_t bytes) const {
    for (size_t i = 0; i < GUARD; i++)
        if (shared[bytes + i] != GUARD_BYTE) return false;
    return true;
}

long setting(const char* name, long otherwise) {
    const char* value = getenv(name);
    return value && *value ? strtol(value, nullptr, 10) : otherwise;
}

static std::map<std::string, const Kernel*>& kernels() {
    static auto* all = new std::map<std::string, const Kernel*>;
    return *all;
}
Kernels::Kernels(const Kernel* file_kernels, size_t n) {
    for (size_t i = 0; i < n; i++) kernels()[file_kernels[i].name] = file_kernels + i;
}
const Kernel* find_kernel(const char* name) {
    const auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second;
}

// Operating system threads that are kept for later launches.
class Workers {
    std::mutex mutex;
    std::condition_variable work, done;
    std::function<void(Block&)> job;
    uint64_t number = 0; // increases with each job
    uint32_t n_wanted = 0, n_taken = 0, n_running = 0, n_threads = 0;

    void work_forever() {
        Block* block = new Block;
        uint64_t last = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            work.wait(lock, [&] { return number != last && n_taken < n_wanted; });
            last = number;
            n_taken++;
            lock.unlock();
            job(*block);
            lock.lock();
            if (--n_running == 0) done.notify_one();
        }
    }

  public:
    // Runs `new_job` on `n` threads at the same time, and waits for all of them.
    void run(uint32_t n, std::function<void(Block&)> new_job) {
        std::unique_lock<std::mutex> lock(mutex);
        for (; n_threads < n; n_threads++) std::thread([this] { work_forever(); }).detach();
        job = std::move(new_job);
        n_wanted = n_running = n;
        n_taken = 0;
        number++;
        work.notify_all();
        done.wait(lock, [&] { return n_running == 0; });
    }
};

// The `Workers` that no launch uses. Launches of several streams run concurrently, since kernels on several devices wait for
// each other.
class IdleWorkers {
    std::mutex mutex;
    std::vector<Workers*> workers;

  public:
    Workers* take() {
        const std::lock_guard<std::mutex> lock(mutex);
        if (workers.empty()) return new Workers;
        Workers* last = workers.back();
        workers.pop_back();
        return last;
    }
    void give(Workers* released) {
        const std::lock_guard<std::mutex> lock(mutex);
        workers.push_back(released);
    }
};

bool run(const Launch& launch) {
    static IdleWorkers* idle = new IdleWorkers;
    static const uint32_t n_cores = (uint32_t)setting("SOFTWARE_CUDA_THREADS", (long)std::thread::hardware_concurrency());
    const Index& grid = launch.grid;
    const uint64_t n = (uint64_t)grid.x * grid.y * grid.z;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    const uint64_t n_threads = launch.cooperative ? n : n < n_cores ? n : n_cores ? n_cores : 1;
    Workers* workers = idle->take();
    workers->run((uint32_t)n_threads, [&](Block& block) {
        block.launch_failed = &failed;
        for (uint64_t i; !failed && (i = next++) < n;) {
            const Index index = {(unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y)};
            const char* why = run_block(block, launch, index);
            if (!why || failed.exchange(true)) continue;
            const Index& t = block.failed_thread;
            fprintf(stderr, "software CUDA device: %s, block (%u, %u, %u), thread (%u, %u, %u): %s\n", launch.kernel->name, index.x,
                    index.y, index.z, t.x, t.y, t.z, why);
        }
    });
    idle->give(workers);
    return !failed;
}

}  // namespace software
