// Tests of the software CUDA device: kernels with known results that use what the project's kernels use, and kernels with
// the mistakes that the device must detect.
#include <software_ptx.hpp>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "driver.hpp"

struct Args {
    u32* words;
    float* floats;
    const float* from;
    u32 n;
};

__global__ void sum_of_block(Args a) {
    __shared__ float sums[32];
    float v = a.from[blockIdx.x * blockDim.x + threadIdx.x];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float sum = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) sum += sums[i];
    a.floats[blockIdx.x] = sum;
    atomicAdd(a.words, 1u);
}

// d = a b, of 16 x 16 and 16 x 8 small integers.
__global__ void product(Args a) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    auto pair = [](int x, int y) { return software::as<u32>(__floats2half2_rn((float)x, (float)y)); };
    auto a_at = [](int row, int k) { return row - 2 * k; };
    auto b_at = [](int k, int column) { return k * column - 3; };
    u32 f[4], h[2];
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i % 2), k = 2 * t + 8 * (i / 2);
        f[i] = pair(a_at(row, k), a_at(row, k + 1));
    }
    for (int i = 0; i < 2; i++) h[i] = pair(b_at(2 * t + 8 * i, g), b_at(2 * t + 8 * i + 1, g));
    float c[4];
    mma_new(c, f[0], f[1], f[2], f[3], h[0], h[1]);
    mma(c, f[0], f[1], f[2], f[3], h[0], h[1]);
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        int sum = 0;
        for (int k = 0; k < 16; k++) sum += a_at(row, k) * b_at(k, column);
        a.floats[row * 8 + column] = c[i] - 2.0f * (float)sum;
    }
}

// Loads four 8 x 8 matrices, also transposed.
__global__ void matrices(Args a) {
    SHARED_MEMORY(16, half, memory);
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) memory[i] = __float2half_rn((float)i);
    __syncwarp();
    u32 straight[4], transposed[4];
    load_matrices(straight, memory + 8 * lane);
    load_matrices_transposed(transposed, memory + 8 * lane);
    u32 wrong = 0;
    for (int i = 0; i < 4; i++) {
        const half2 s = software::as<half2>(straight[i]), u = software::as<half2>(transposed[i]);
        wrong += __low2float(s) != (float)(64 * i + 8 * g + 2 * t) || __high2float(s) != (float)(64 * i + 8 * g + 2 * t + 1);
        wrong += __low2float(u) != (float)(64 * i + 16 * t + g) || __high2float(u) != (float)(64 * i + 16 * t + 8 + g);
    }
    atomicAdd(a.words, wrong);
}

// A pipeline of bulk copies that mbarriers count: the first warp copies, another one uses the data.
__global__ void bulk_copies(Args a) {
    SHARED_MEMORY(128, float, memory);
    __shared__ u64_t full[2], empty[2];
    constexpr int EACH = 64;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) barrier_init(full + i, 1), barrier_init(empty + i, 32);
    __syncthreads();
    const u32 n = a.n / EACH;
    if (threadIdx.x < 32) {
        if (threadIdx.x != 0) return;
        for (u32 i = 0; i < n; i++) {
            if (i >= 2)
                while (!barrier_try_wait(empty + i % 2, (i / 2 + 1) % 2)) spin_pause();
            barrier_arrive_expecting(full + i % 2, EACH * 4);
            copy_bulk(memory + i % 2 * EACH, a.from + i * EACH, EACH * 4, full + i % 2);
        }
        return;
    }
    float sum = 0.0f;
    for (u32 i = 0; i < n; i++) {
        while (!barrier_try_wait(full + i % 2, i / 2 % 2)) spin_pause();
        sum += memory[i % 2 * EACH + threadIdx.x % 32] + memory[i % 2 * EACH + 32 + threadIdx.x % 32];
        barrier_arrive(empty + i % 2);
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x == 32) a.floats[0] = sum;
}

// Blocks that wait for each other repeatedly.
__global__ void steps_together(Args a) {
    for (u32 step = 1; step <= a.n; step++) {
        if (threadIdx.x == 0) {
            add_release(a.words, 1);
            while (load_acquire(a.words) < step * gridDim.x) spin_pause();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) store_relaxed((uint4*)a.floats + blockIdx.x, make_uint4(a.n, blockIdx.x, 2, 3));
}

// Kernels with mistakes.
__global__ void writes_too_far(Args a) { a.words[a.n] = 7; }
__global__ void writes_shared_too_far(Args) {
    SHARED_MEMORY(16, u32, memory);
    memory[64] = 7;
}
__global__ void does_not_wait(Args a) {
    SHARED_MEMORY(16, float, memory);
    copy16(memory, a.from);
    commit_copies();
    a.floats[0] = memory[0];
    wait_for_copies<0>();
    a.floats[1] = memory[0];
}
__global__ void does_not_meet(Args) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    else __shfl_xor_sync(~0u, 1, 1);
}
__global__ void meets_for_others(Args) {
    if (threadIdx.x % 2 == 0) __ballot_sync(~0u, 1);
    else __shfl_xor_sync(~0u, 1, 1);
}
__global__ void ends_itself(Args) { __trap(); }
__global__ void copies_unaligned(Args a) { copy16(a.words + 1, a.from); }
__global__ void reads_unaligned(Args a) { a.words[0] = load_stream((const uint4*)(a.words + a.n)).x; }
__global__ void waits_forever(Args a) {
    while (load_relaxed(a.words) != 12345) spin_pause();
}

#define K(NAME) SOFTWARE_KERNEL(#NAME, NAME)
static const software::Kernel kernels[] = {
    K(sum_of_block), K(product), K(matrices), K(bulk_copies), K(steps_together), K(writes_too_far), K(writes_shared_too_far),
    K(does_not_wait), K(does_not_meet), K(meets_for_others), K(ends_itself), K(copies_unaligned), K(reads_unaligned), K(waits_forever),
};
static const software::Kernels known(kernels, sizeof kernels / sizeof *kernels);

extern "C" {
Result cuMemAlloc_v2(uint64_t*, size_t);
Result cuMemFree_v2(uint64_t);
Result cuMemcpyHtoD_v2(uint64_t, const void*, size_t);
Result cuMemcpyDtoH_v2(void*, uint64_t, size_t);
Result cuMemsetD8Async(uint64_t, unsigned char, size_t, Stream*);
Result cuModuleGetFunction(struct Function**, void*, const char*);
Result cuLaunchKernelEx(const LaunchConfig*, struct Function*, void**, void**);
Result cuStreamCreate(Stream**, unsigned);
Result cuStreamBeginCapture_v2(Stream*, int);
Result cuStreamEndCapture(Stream*, Graph**);
Result cuGraphInstantiateWithFlags(Graph**, const Graph*, unsigned long long);
Result cuGraphLaunch(const Graph*, Stream*);
}

static void expect(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "does not hold: %s\n", what);
    exit(1);
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__)

template <typename T> struct Buffer {
    uint64_t address = 0;
    size_t n;
    explicit Buffer(size_t n) : n(n) { EXPECT(cuMemAlloc_v2(&address, n * sizeof(T)) == SUCCESS); }
    explicit Buffer(const std::vector<T>& from) : Buffer(from.size()) {
        EXPECT(cuMemcpyHtoD_v2(address, from.data(), n * sizeof(T)) == SUCCESS);
    }
    ~Buffer() { EXPECT(cuMemFree_v2(address) == SUCCESS); }
    T* p() const { return (T*)address; }
    std::vector<T> read() const {
        std::vector<T> v(n);
        EXPECT(cuMemcpyDtoH_v2(v.data(), address, n * sizeof(T)) == SUCCESS);
        return v;
    }
};

static Result launch(const char* name, unsigned blocks, unsigned threads, unsigned shared, Args args, bool cooperative = false,
                     Stream* stream = nullptr) {
    Function* function;
    EXPECT(cuModuleGetFunction(&function, nullptr, name) == SUCCESS);
    LaunchAttribute attribute = {};
    attribute.id = ATTRIBUTE_COOPERATIVE;
    attribute.value.cooperative = cooperative;
    const LaunchConfig config = {{blocks, 1, 1}, {threads, 1, 1}, shared, stream, &attribute, 1};
    void* arguments[] = {&args};
    return cuLaunchKernelEx(&config, function, arguments, nullptr);
}

// Whether the kernel fails, or ends the process. It runs in a process of its own.
static bool is_detected(const char* name, unsigned threads, unsigned n) {
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr)) _exit(0);
        Buffer<u32> words(16);
        const Result result = launch(name, 1, threads, 256, {words.p(), (float*)words.p(), (const float*)words.p(), n});
        if (result == LAUNCH_FAILED && launch("product", 1, 32, 0, {}) == LAUNCH_FAILED) _exit(2);
        // An error that a sanitizer finds has ended the process before; an overrun ends it here.
        cuMemFree_v2(words.address);
        _exit(0);
    }
    int status = 0;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

int main() {
    setenv("SOFTWARE_CUDA_PATIENCE", "1", 1);
    unsetenv("SOFTWARE_CUDA_EARLY_COPIES");
    // The mistakes are tested first, while the process has no threads to fork.
    EXPECT(!is_detected("writes_too_far", 1, 15));
    EXPECT(is_detected("writes_too_far", 1, 16));
    EXPECT(is_detected("writes_too_far", 1, ~0u));
    EXPECT(is_detected("writes_shared_too_far", 1, 0));
    EXPECT(is_detected("does_not_meet", 64, 0));
    EXPECT(is_detected("meets_for_others", 32, 0));
    EXPECT(is_detected("ends_itself", 32, 0));
    EXPECT(is_detected("copies_unaligned", 1, 0));
    EXPECT(!is_detected("reads_unaligned", 1, 4));
    EXPECT(is_detected("reads_unaligned", 1, 5));
    EXPECT(is_detected("waits_forever", 32, 0));

    constexpr unsigned BLOCKS = 5, THREADS = 128;
    std::vector<float> values(BLOCKS * THREADS);
    for (size_t i = 0; i < values.size(); i++) values[i] = (float)(i % 11);
    const Buffer<float> from(values);
    {
        const Buffer<u32> words(std::vector<u32>(4));
        const Buffer<float> sums(BLOCKS);
        // By itself, then in a CUDA graph that runs twice.
        EXPECT(launch("sum_of_block", BLOCKS, THREADS, 0, {words.p(), sums.p(), from.p(), 0}) == SUCCESS);
        Stream* stream;
        Graph *graph, *exec;
        EXPECT(cuStreamCreate(&stream, 0) == SUCCESS && cuStreamBeginCapture_v2(stream, 0) == SUCCESS);
        EXPECT(launch("sum_of_block", BLOCKS, THREADS, 0, {words.p(), sums.p(), from.p(), 0}, false, stream) == SUCCESS);
        EXPECT(cuStreamEndCapture(stream, &graph) == SUCCESS && cuGraphInstantiateWithFlags(&exec, graph, 0) == SUCCESS);
        EXPECT(words.read()[0] == BLOCKS);
        EXPECT(cuGraphLaunch(exec, stream) == SUCCESS && cuGraphLaunch(exec, stream) == SUCCESS);
        EXPECT(words.read()[0] == 3 * BLOCKS);
        for (unsigned b = 0; b < BLOCKS; b++) {
            float want = 0.0f;
            for (unsigned i = 0; i < THREADS; i++) want += values[b * THREADS + i];
            EXPECT(sums.read()[b] == want);
        }
    }
    {
        const Buffer<float> difference(128);
        EXPECT(launch("product", 1, 32, 0, {nullptr, difference.p(), nullptr, 0}) == SUCCESS);
        for (const float d : difference.read()) EXPECT(d == 0.0f);
        const Buffer<u32> wrong(std::vector<u32>(4));
        EXPECT(launch("matrices", 1, 32, 512, {wrong.p(), nullptr, nullptr, 0}) == SUCCESS);
        EXPECT(wrong.read()[0] == 0);
    }
    {
        const Buffer<float> sum(4);
        EXPECT(launch("bulk_copies", 1, 64, 512, {nullptr, sum.p(), from.p(), 640}) == SUCCESS);
        float want = 0.0f;
        for (const float v : values) want += v;
        EXPECT(sum.read()[0] == want);
        // A copy that was not awaited leaves NaN.
        const Buffer<float> copied(4);
        EXPECT(launch("does_not_wait", 1, 1, 16, {nullptr, copied.p(), from.p() + 4, 0}) == SUCCESS);
        EXPECT(isnan(copied.read()[0]) && copied.read()[1] == values[4]);
    }
    {
        const Buffer<u32> count(std::vector<u32>(4));
        const Buffer<float> out(4 * 4);
        EXPECT(launch("steps_together", 4, 64, 0, {count.p(), out.p(), nullptr, 100}, true) == SUCCESS);
        EXPECT(count.read()[0] == 400);
        const auto words = out.read();
        for (unsigned b = 0; b < 4; b++) EXPECT(software::as<u32>(words[4 * b]) == 100 && software::as<u32>(words[4 * b + 1]) == b);
        EXPECT(launch("steps_together", 4096, 1024, 0, {}, true) == COOPERATIVE_LAUNCH_TOO_LARGE);
        EXPECT(launch("steps_together", 1, 32, 64 << 10, {}) == INVALID_VALUE);
    }
    puts("the software CUDA device: all checks hold");
}
