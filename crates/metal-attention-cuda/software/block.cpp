// Runs the threads of one block as fibers on one operating system thread: switching between fibers, warp-wide operations,
// and barriers.
#include "software_block.hpp"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "software_run.hpp"

namespace software {

// Saves the callee-saved registers and the stack pointer to `from`, and continues on the stack `to`.
extern "C" void software_switch(void** from, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
.hidden software_switch
.globl software_switch
.type software_switch, @function
software_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size software_switch, .-software_switch
)");
constexpr int SAVED = 8, RETURN = 6; // saved words, and the index of the return address; the last word keeps the stack alignment of a call
#elif defined(__aarch64__)
asm(R"(
.text
.hidden software_switch
.globl software_switch
.type software_switch, %function
software_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size software_switch, .-software_switch
)");
constexpr int SAVED = 20, RETURN = 11;
#else
#error "fibers are written for x86-64 and aarch64"
#endif

// Adds a fiber to the ring of those that can run: behind all others, or before them.
static void make_ready(Block& block, Fiber* ready_fiber, bool before = false) {
    ready_fiber->waits_for = nullptr;
    block.ready[(before ? --block.ready_begin : block.ready_end++) % MAX_THREADS] = ready_fiber;
    block.all_poll = false;
    block.n_idle = 0;
}

static uint64_t seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec;
}

// Makes all fibers that poll ready, as no other fiber can run. Fails the block if another block failed, or if all its threads have polled for too
// long.
static void poll_again(Block& block) {
    static const long patience = setting("SOFTWARE_CUDA_PATIENCE", 60);
    // The values may be those of other blocks, of which there are more than cores: these run during a pause of some 50 us.
    const timespec shortest = {0, 1};
    nanosleep(&shortest, nullptr);
    // Nothing but polling was done since the last call.
    if (block.all_poll) {
        if (++block.n_idle == 1024) block.waits_since = seconds();
        else if (block.n_idle % 1024 == 0 && seconds() - block.waits_since > (uint64_t)patience)
            block.failure = "all threads poll for a value that is not written";
        if (*block.launch_failed) block.failure = "another block failed";
        if (block.failure) block.failed_thread = block.polling[0]->thread;
    }
    block.all_poll = true;
    for (uint32_t i = 0; i < block.n_polling; i++) block.ready[block.ready_end++ % MAX_THREADS] = block.polling[i];
    block.n_polling = 0;
}

// Continues the first fiber of the ring; those that poll come after all others. If all have returned or the block failed,
// continues the caller of run_block. `from` receives the stack pointer of the fiber that is left.
static void switch_to_next(Block& block, void** from) {
    if (block.ready_begin == block.ready_end && block.n_polling > 0) poll_again(block);
    if (block.failure || block.n_live == 0) {
        software_switch(from, block.caller);
        return;
    }
    if (block.ready_begin == block.ready_end) {
        // A deadlock: the first waiting thread names what it waits for.
        for (uint32_t i = 0; i < block.n_threads; i++)
            if (block.fibers[i]->waits_for) {
                snprintf(block.failure_text, sizeof block.failure_text, "all threads wait, thread %u for %s", i, block.fibers[i]->waits_for);
                break;
            }
        block.failure = block.failure_text;
        software_switch(from, block.caller);
        return;
    }
    Fiber* next = block.ready[block.ready_begin++ % MAX_THREADS];
    if (next == fiber()) return;
    software_switch(from, next->stack_pointer);
}

// Suspends the current fiber. `what` names in messages what it waits for.
static void wait_for(const char* what) {
    Fiber* me = fiber();
    me->waits_for = what;
    switch_to_next(*me->block, &me->stack_pointer);
}

void fail(const char* why) {
    Block& block = *fiber()->block;
    block.failure = why;
    block.failed_thread = fiber()->thread;
    switch_to_next(block, &fiber()->stack_pointer);
    abort();
}

// The last lane has arrived: performs the operation and makes all other lanes ready.
static void finish_meeting(Block& block, Warp& warp, Meeting& meeting) {
    const uint32_t arrived = meeting.arrived;
    const Fiber* me = fiber();
    if (meeting.perform) meeting.perform(meeting.given, arrived);
    meeting.arrived = 0;
    meeting.mask = 0;
    // The lanes run on before other warps, in ascending order: their stacks are in the cache, and warps get as far apart as barriers allow.
    for (int i = 31; i >= 0; i--)
        if ((arrived >> i & 1) && warp.lanes[i] != me) make_ready(block, warp.lanes[i], /* before */ true);
}

void meet(uint32_t mask, const char* what, Perform* perform, void* given) {
    Fiber* me = fiber();
    Warp& warp = *me->warp;
    if (!(mask >> me->lane & 1)) fail("a lane meets others of a mask that it is not in");
    Meeting* meeting = nullptr;
    for (Meeting& m : warp.meetings)
        if (m.mask == mask) {
            meeting = &m;
            break;
        }
    if (!meeting) {
        for (Meeting& m : warp.meetings)
            if (!meeting && m.mask == 0) meeting = &m;
        if (!meeting) fail("lanes of a warp meet in more masks at once than are provided for");
        meeting->mask = mask, meeting->perform = perform;
    }
    if (meeting->perform != perform) fail("lanes of a warp meet for different things");
    meeting->given[me->lane] = given;
    meeting->arrived |= 1u << me->lane;
    if (meeting->arrived == (mask & warp.live)) {
        finish_meeting(*me->block, warp, *meeting);
    } else {
        wait_for(what);
    }
}

static void release_barrier(Block& block, Barrier& barrier) {
    const Fiber* me = fiber();
    for (uint32_t i = 0; i < barrier.n; i++)
        if (barrier.waiting[i] && barrier.waiting[i] != me) make_ready(block, barrier.waiting[i]);
    barrier.n = 0;
}

// Counts a thread at barrier `id`. `waits`: its fiber, or null if it does not wait. Returns whether it was the last one.
static bool arrive(unsigned id, unsigned n_threads, Fiber* waits) {
    Block& block = *fiber()->block;
    if (id >= BARRIERS) fail("there are 16 barriers");
    Barrier& barrier = block.barriers[id];
    if (barrier.n > 0 && barrier.wanted != n_threads) fail("threads wait at a barrier for different numbers of others");
    barrier.wanted = n_threads;
    barrier.waiting[barrier.n++] = waits;
    const bool is_last = barrier.n == (n_threads ? n_threads : block.n_live);
    if (is_last) release_barrier(block, barrier);
    return is_last;
}
void block_barrier(unsigned id, unsigned n_threads) {
    if (!arrive(id, n_threads, fiber())) wait_for("a barrier of the block");
}
void block_arrive(unsigned id, unsigned n_threads) { arrive(id, n_threads, nullptr); }

void pause() {
    Fiber* me = fiber();
    Block& block = *me->block;
    block.polling[block.n_polling++] = me;
    switch_to_next(block, &me->stack_pointer);
}

static void end_thread() {
    Fiber* me = fiber();
    Block& block = *me->block;
    Warp& warp = *me->warp;
    warp.live &= ~(1u << me->lane);
    block.n_live--;
    for (Meeting& m : warp.meetings)
        if (m.arrived && m.arrived == (m.mask & warp.live)) finish_meeting(block, warp, m);
    for (Barrier& b : block.barriers)
        if (b.n > 0 && b.wanted == 0 && b.n == block.n_live) release_barrier(block, b);
    switch_to_next(block, &me->stack_pointer);
    abort();
}

static void run_thread() {
    Block& block = *fiber()->block;
    block.launch->kernel->run(block.launch->argument.data());
    end_thread();
}

const char* run_block(Block& block, const Launch& launch, Index index) {
    const uint32_t n = launch.block.x * launch.block.y * launch.block.z;
    block.launch = &launch;
    block.failure = nullptr;
    block.n_threads = block.n_live = n;
    block.ready_begin = block.ready_end = block.n_polling = block.n_idle = 0;
    block.all_poll = false;
    block.bulk_copies.clear();
    for (Barrier& b : block.barriers) b.n = 0;
    block.place = {index, launch.block, launch.grid, block.begin_shared(launch.shared_bytes)};
    for (uint32_t i = 0; i < n; i++) {
        Fiber& f = block.fiber(i);
        Warp& warp = block.warps[i / 32];
        if (i % 32 == 0) {
            warp.live = n - i >= 32 ? ~0u : (1u << (n - i)) - 1;
            for (Meeting& m : warp.meetings) m.mask = m.arrived = 0;
        }
        warp.lanes[i % 32] = &f;
        f.thread = {i % launch.block.x, i / launch.block.x % launch.block.y, i / (launch.block.x * launch.block.y)};
        f.lane = i % 32;
        f.place = &block.place;
        f.warp = &warp;
        f.block = &block;
        f.copies.copies.clear(), f.copies.groups.clear();
        f.copies.n_copied = f.copies.n_groups_copied = 0;
        // The starts of stacks are in different cache sets, too.
        void** top = (void**)(((uintptr_t)&f & ~(STACK - 1)) + STACK - i % 64 * 256) - SAVED;
        memset(top, 0, SAVED * sizeof *top);
        top[RETURN] = (void*)run_thread;
        f.stack_pointer = top;
        make_ready(block, &f);
    }
    switch_to_next(block, &block.caller);
    if (!block.failure && !block.shared_is_intact(launch.shared_bytes)) {
        block.failure = "workgroup memory was written to beyond its end";
        block.failed_thread = {0, 0, 0};
    }
    return block.failure;
}

}  // namespace software
