// The driver functions except those of memory: devices, contexts, streams, events, kernels and graphs. A stream does its
// work before a call returns. After a kernel has failed, all later calls of its device fail, as on a GPU.
#include "driver.hpp"

#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <mutex>
#include <thread>

using software::setting;

int n_multiprocessors() {
    static const int n = (int)setting("SOFTWARE_CUDA_MULTIPROCESSORS", 4);
    return n;
}
// The compute capability: ten times the major number plus the minor one.
static int compute_capability() {
    static const int n = (int)setting("SOFTWARE_CUDA_CAPABILITY", 90);
    return n;
}

int n_devices() {
    static const int n = (int)setting("SOFTWARE_CUDA_DEVICES", 4);
    return n < 1 ? 1 : n < MAX_DEVICES ? n : MAX_DEVICES;
}

// The first error of each device, or SUCCESS.
static std::atomic<int> failures[MAX_DEVICES];
static std::atomic<int>& failure_of(const Stream* stream) { return failures[stream ? stream->device : current_device()]; }

Result submit(Stream* stream, Work work) {
    if (stream && stream->capture) {
        stream->capture->work.push_back(std::move(work));
        return SUCCESS;
    }
    std::atomic<int>& failure = failure_of(stream);
    if (failure != SUCCESS) return (Result)failure.load();
    const Result result = work();
    if (result == LAUNCH_FAILED) failure = result;
    return result;
}

// Errors.
DRIVER cuGetErrorString(Result error, const char** text) {
    *text = nullptr;
    switch (error) {
        case SUCCESS: *text = "no error"; break;
        case INVALID_VALUE: *text = "invalid argument"; break;
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case INVALID_DEVICE: *text = "invalid device ordinal"; break;
        case INVALID_HANDLE: *text = "invalid resource handle"; break;
        case ILLEGAL_STATE: *text = "the operation cannot be performed in the present state"; break;
        case NOT_FOUND: *text = "named symbol not found"; break;
        case LAUNCH_OUT_OF_RESOURCES: *text = "too many resources requested for launch"; break;
        case LAUNCH_FAILED: *text = "unspecified launch failure"; break;
        case COOPERATIVE_LAUNCH_TOO_LARGE: *text = "too many blocks in cooperative launch"; break;
        case PEER_ACCESS_UNSUPPORTED: *text = "peer access is not supported between these two devices"; break;
        case PEER_ACCESS_ALREADY_ENABLED: *text = "peer access is already enabled"; break;
        case STREAM_CAPTURE_UNSUPPORTED: *text = "operation not permitted when stream is capturing"; break;
    }
    return *text ? SUCCESS : INVALID_VALUE;
}

// Devices.
DRIVER cuInit(unsigned) { return SUCCESS; }
DRIVER cuDriverGetVersion(int* version) { return *version = (int)setting("SOFTWARE_CUDA_DRIVER", DRIVER_VERSION), SUCCESS; }
DRIVER cuDeviceGetCount(int* n) { return *n = n_devices(), SUCCESS; }
DRIVER cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < n_devices() ? SUCCESS : INVALID_DEVICE;
}
DRIVER cuDeviceGetName(char* name, int length, int) {
    if (length < 1) return INVALID_VALUE;
    strncpy(name, "software CUDA device", (size_t)length - 1);
    name[length - 1] = 0;
    return SUCCESS;
}
DRIVER cuMemGetInfo_v2(size_t*, size_t*);
DRIVER cuDeviceTotalMem_v2(size_t* bytes, int) {
    size_t free_bytes;
    return cuMemGetInfo_v2(&free_bytes, bytes);
}
DRIVER cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1: *value = THREADS_OF_BLOCK; break;
        case 8: *value = SHARED_OF_BLOCK; break;
        case 10: *value = 32; break; // threads of a warp
        case 16: *value = n_multiprocessors(); break;
        case 38: *value = 50 << 20; break; // L2 cache
        case 39: *value = THREADS_OF_MULTIPROCESSOR; break;
        case 41: *value = 1; break; // one address space
        case 75: *value = compute_capability() / 10; break;
        case 76: *value = compute_capability() % 10; break;
        case 81: *value = SHARED_OF_MULTIPROCESSOR; break;
        case 95: *value = 1; break; // cooperative launches
        case 97: *value = MOST_SHARED_OF_BLOCK; break;
        case 106: *value = BLOCKS_OF_MULTIPROCESSOR; break;
        case 111: *value = SHARED_OF_DRIVER; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

// One context for each device; it has no other contents than its address.
static int contexts[MAX_DEVICES];
static thread_local void* current;
int current_device() { return current ? (int)((int*)current - contexts) : 0; }
DRIVER cuDevicePrimaryCtxRetain(void** context, int device) { return *context = contexts + device, SUCCESS; }
DRIVER cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
DRIVER cuCtxSetCurrent(void* context) { return current = context, SUCCESS; }
DRIVER cuCtxGetCurrent(void** context) { return *context = current, SUCCESS; }
DRIVER cuCtxSynchronize() { return (Result)failure_of(nullptr).load(); }

// Whether a device has enabled access to another one's memory. All devices share one memory.
static std::atomic<bool> peer_access_enabled[MAX_DEVICES][MAX_DEVICES];
DRIVER cuDeviceCanAccessPeer(int* can, int device, int peer) {
    static const bool peers = setting("SOFTWARE_CUDA_PEERS", 1) != 0;
    if (device < 0 || peer < 0 || device >= n_devices() || peer >= n_devices()) return INVALID_DEVICE;
    return *can = peers && device != peer, SUCCESS;
}
DRIVER cuCtxEnablePeerAccess(void* peer, unsigned flags) {
    if (!peer || flags) return INVALID_VALUE;
    const int peer_device = (int)((int*)peer - contexts);
    int can = 0;
    if (const Result result = cuDeviceCanAccessPeer(&can, current_device(), peer_device)) return result;
    if (!can) return PEER_ACCESS_UNSUPPORTED;
    return peer_access_enabled[current_device()][peer_device].exchange(true) ? PEER_ACCESS_ALREADY_ENABLED : SUCCESS;
}

// Streams and events.
DRIVER cuStreamCreate(Stream** stream, unsigned) {
    *stream = new Stream;
    (*stream)->device = current_device();
    return SUCCESS;
}
DRIVER cuStreamDestroy_v2(Stream* stream) {
    if (!stream) return INVALID_HANDLE;
    delete stream;
    return SUCCESS;
}
DRIVER cuStreamSynchronize(Stream* stream) {
    if (stream && stream->capture) return STREAM_CAPTURE_UNSUPPORTED;
    return (Result)failure_of(stream).load();
}
DRIVER cuStreamQuery(Stream* stream) { return cuStreamSynchronize(stream); }

struct Event {
    std::chrono::steady_clock::time_point time;
    bool recorded = false;
    int device = 0;
};
DRIVER cuEventCreate(Event** event, unsigned) { return *event = new Event, SUCCESS; }
DRIVER cuEventDestroy_v2(Event* event) {
    if (!event) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}
DRIVER cuEventRecord(Event* event, Stream* stream) {
    if (!event) return INVALID_HANDLE;
    event->device = stream ? stream->device : current_device();
    return submit(stream, [=] {
        event->time = std::chrono::steady_clock::now();
        event->recorded = true;
        return SUCCESS;
    });
}
DRIVER cuEventQuery(Event* event) { return event ? (Result)failures[event->device].load() : INVALID_HANDLE; }
DRIVER cuEventSynchronize(Event* event) { return cuEventQuery(event); }
DRIVER cuStreamWaitEvent(Stream*, Event* event, unsigned) { return event ? SUCCESS : INVALID_HANDLE; }
DRIVER cuEventElapsedTime_v2(float* milliseconds, Event* from, Event* to) {
    if (!from || !to || !from->recorded || !to->recorded) return INVALID_HANDLE;
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return SUCCESS;
}

// Kernels. The image of a module is ignored: all kernels are compiled into this library, and every module has all of them.
struct Function {
    const software::Kernel* kernel;
    unsigned most_shared = SHARED_OF_BLOCK;
};
DRIVER cuModuleLoadData(void** module, const void* image) {
    if (!image) return INVALID_VALUE;
    *module = contexts;
    return SUCCESS;
}
DRIVER cuModuleUnload(void*) { return SUCCESS; }
DRIVER cuModuleGetFunction(Function** function, void*, const char* name) {
    const software::Kernel* kernel = software::find_kernel(name);
    if (!kernel) return NOT_FOUND;
    // Functions are never freed; there are few.
    *function = new Function{kernel};
    return SUCCESS;
}
DRIVER cuFuncSetAttribute(Function* function, int attribute, int value) {
    constexpr int MAX_DYNAMIC_SHARED = 8;
    if (!function) return INVALID_HANDLE;
    if (attribute != MAX_DYNAMIC_SHARED) return SUCCESS;
    if (value < 0 || (unsigned)value > MOST_SHARED_OF_BLOCK) return INVALID_VALUE;
    function->most_shared = (unsigned)value;
    return SUCCESS;
}
DRIVER cuFuncGetAttribute(int* value, int attribute, Function* function) {
    if (!function) return INVALID_HANDLE;
    switch (attribute) {
        case 0: *value = THREADS_OF_BLOCK; break;
        case 1: case 2: case 3: *value = 0; break; // memory that the kernel itself uses
        case 4: *value = 64; break; // registers
        case 8: *value = (int)function->most_shared; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}
DRIVER cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* bytes) {
    if (!function) return INVALID_HANDLE;
    if (index > 0) return INVALID_VALUE; // all kernels have one parameter
    *offset = 0;
    *bytes = function->kernel->argument_bytes;
    return SUCCESS;
}
DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Function* function, int threads, size_t shared_bytes) {
    if (!function || threads < 1) return INVALID_VALUE;
    if (threads > THREADS_OF_BLOCK || shared_bytes > function->most_shared) return *n = 0, SUCCESS;
    const size_t by_memory = SHARED_OF_MULTIPROCESSOR / (shared_bytes + SHARED_OF_DRIVER);
    const size_t by_threads = (size_t)THREADS_OF_MULTIPROCESSOR / ((threads + 31) / 32 * 32);
    const size_t most = by_memory < by_threads ? by_memory : by_threads;
    *n = most < BLOCKS_OF_MULTIPROCESSOR ? (int)most : BLOCKS_OF_MULTIPROCESSOR;
    return SUCCESS;
}

DRIVER cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** arguments, void** extra) {
    if (!config || !function || !arguments || extra) return INVALID_VALUE;
    const unsigned(&grid)[3] = config->grid;
    const unsigned(&block)[3] = config->block;
    const uint64_t n_threads = (uint64_t)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > 65535 || grid[2] > 65535) return INVALID_VALUE;
    if (n_threads == 0 || n_threads > THREADS_OF_BLOCK || config->shared_bytes > function->most_shared) return INVALID_VALUE;
    software::Launch launch = {function->kernel, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, config->shared_bytes, false, {}};
    for (unsigned i = 0; i < config->n_attributes; i++)
        if (config->attributes[i].id == ATTRIBUTE_COOPERATIVE) launch.cooperative = config->attributes[i].value.cooperative != 0;
    if (launch.cooperative) {
        int per_multiprocessor = 0;
        cuOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, function, (int)n_threads, config->shared_bytes);
        if ((uint64_t)grid[0] * grid[1] * grid[2] > (uint64_t)per_multiprocessor * n_multiprocessors()) return COOPERATIVE_LAUNCH_TOO_LARGE;
    }
    const auto* argument = (const unsigned char*)arguments[0];
    launch.argument.assign(argument, argument + function->kernel->argument_bytes);
    return submit(config->stream, [launch = std::move(launch)] {
        static const long most = setting("SOFTWARE_CUDA_LAUNCHES", -1);
        static std::atomic<long> n_launched{0};
        if (most >= 0 && n_launched++ >= most) return LAUNCH_FAILED;
        return software::run(launch) ? SUCCESS : LAUNCH_FAILED;
    });
}

// CUDA graphs: the recorded work in order.
DRIVER cuStreamBeginCapture_v2(Stream* stream, int) {
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return ILLEGAL_STATE;
    stream->capture = new Graph;
    return SUCCESS;
}
DRIVER cuStreamEndCapture(Stream* stream, Graph** graph) {
    if (!stream || !stream->capture) return ILLEGAL_STATE;
    *graph = stream->capture;
    stream->capture = nullptr;
    return SUCCESS;
}
DRIVER cuStreamIsCapturing(Stream* stream, int* is) { return *is = stream && stream->capture, SUCCESS; }
DRIVER cuGraphInstantiateWithFlags(Graph** exec, const Graph* graph, unsigned long long) {
    if (!graph) return INVALID_HANDLE;
    *exec = new Graph(*graph);
    return SUCCESS;
}
DRIVER cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
DRIVER cuGraphExecDestroy(Graph* exec) { return delete exec, SUCCESS; }
DRIVER cuGraphLaunch(const Graph* exec, Stream* stream) {
    if (!exec) return INVALID_HANDLE;
    for (const Work& work : exec->work)
        if (const Result result = submit(stream, work)) return result;
    return SUCCESS;
}
