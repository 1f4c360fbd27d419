// The part of the driver's interface that `metal-attention-cuda` uses. Names, numbers and layouts are those of CUDA 13.0.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <functional>
#include <vector>

#include "software_block.hpp"

#define DRIVER extern "C" __attribute__((visibility("default"))) Result

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    PEER_ACCESS_UNSUPPORTED = 217,
    NOT_FOUND = 500,
    LAUNCH_OUT_OF_RESOURCES = 701,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    LAUNCH_FAILED = 719,
    COOPERATIVE_LAUNCH_TOO_LARGE = 720,
    STREAM_CAPTURE_UNSUPPORTED = 900,
};

enum LaunchAttributeId : int { ATTRIBUTE_COOPERATIVE = 2 };
struct LaunchAttribute {
    int id;
    char padding[4];
    union {
        char bytes[64];
        int cooperative;
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

// A unit of work of a stream.
typedef std::function<Result()> Work;
struct Graph {
    std::vector<Work> work;
};
struct Stream {
    int device = 0;
    Graph* capture = nullptr; // records work instead of doing it, unless null
};

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream* stream;
    LaunchAttribute* attributes;
    unsigned n_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

// Does `work` at once, because the stream has no other work, or records it if the stream is capturing.
Result submit(Stream* stream, Work work);

constexpr int MAX_DEVICES = 16;
constexpr int DRIVER_VERSION = 13000;
constexpr int THREADS_OF_BLOCK = 1024, THREADS_OF_MULTIPROCESSOR = 2048, BLOCKS_OF_MULTIPROCESSOR = 32;
constexpr unsigned SHARED_OF_BLOCK = 48 << 10;       // unless an attribute of the kernel raises it
constexpr unsigned MOST_SHARED_OF_BLOCK = 227 << 10;
constexpr unsigned SHARED_OF_MULTIPROCESSOR = 228 << 10, SHARED_OF_DRIVER = 1 << 10;
int n_multiprocessors();
// Number of devices.
int n_devices();
// The device whose context is current in the calling thread.
int current_device();
