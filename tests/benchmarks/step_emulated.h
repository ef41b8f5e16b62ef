// What `step.cu` needs of a GPU, on a CPU: for tests, slow, and of one operating system thread.
//
// Each GPU thread is a context of its own. They run in turns until they wait for one another: at a
// barrier, at a product of a warp, for a copy. Copies are done late, so that waiting for them matters.
// Products add inputs one after another, so equal bits mean the same here as on a GPU.

#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#define DEVICE static inline
#define METHOD inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
typedef unsigned int u32;
typedef unsigned long long u64;

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x; };
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
template <class A, class B> static inline int min(A a, B b) { return (int)(a < (A)b ? a : (A)b); }
template <class A, class B> static inline int max(A a, B b) { return (int)(a > (A)b ? a : (A)b); }
DEVICE float __uint_as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
DEVICE u32 __float_as_uint(float f) { u32 x; memcpy(&x, &f, 4); return x; }
DEVICE u32 __popc(u32 x) { return (u32)__builtin_popcount(x); }

// What lanes hand one another; two sets in turn, as a lane may be one exchange ahead.
struct Exchange {
    u32 round = 0;
    int arrived = 0;
    struct { const void *row; u32 a[4], b[2]; } given[2][32];
};
struct Meeting { u32 round = 0; int arrived = 0; };
struct Copy { void *target; const void *source; u32 bytes; u64 *bar; };

struct Fibre {
    jmp_buf at;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
    int thread, block;
    const u32 *watched = nullptr;  // it waits until this is no longer `was`
    u32 was = 0;
    bool begun = false, done = false;
};
struct Machine {
    std::vector<Fibre> fibres;
    std::vector<std::vector<unsigned char>> shared;
    std::vector<Exchange> warps;
    std::vector<Meeting> all, consumers;
    std::deque<Copy> copies;
    jmp_buf back;
    Fibre *now = nullptr;
    int threads = 0, workers = 0;
    bool failed = false;
};
static Machine *machine;
static Index threadIdx, blockIdx, gridDim;
static unsigned char *shared_memory;
static void (*kernel_body)();

static void yield_now(const u32 *watched = nullptr) {
    Fibre *f = machine->now;
    f->watched = watched;
    if (watched) f->was = *watched;
    if (!_setjmp(f->at)) _longjmp(machine->back, 1);
    f->watched = nullptr;
}
static void meet_at(Meeting &m, int count) {
    if (++m.arrived == count) {
        m.arrived = 0;
        ++m.round;
    } else {
        yield_now(&m.round);
    }
}
DEVICE void __syncthreads() { meet_at(machine->all[machine->now->block], machine->threads); }
DEVICE void sync_consumers() { meet_at(machine->consumers[machine->now->block], machine->workers); }

// Waits for the whole warp; then what its lanes gave.
template <class Give> static auto *exchange(Give give) {
    Fibre *f = machine->now;
    Exchange &e = machine->warps[(f->block * machine->threads + f->thread) / 32];
    auto *set = e.given[e.round & 1];
    give(set[f->thread & 31]);
    if (++e.arrived == 32) {
        e.arrived = 0;
        ++e.round;
    } else {
        yield_now(&e.round);
    }
    return set;
}
DEVICE void sync_warp() { exchange([](auto &) {}); }
DEVICE float shuffle_xor(float x, int mask) {
    int lane = machine->now->thread & 31;
    auto *set = exchange([&](auto &g) { memcpy(g.a, &x, 4); });
    return __uint_as_float(set[lane ^ mask].a[0]);
}
DEVICE u32 vote(bool x) {
    auto *set = exchange([&](auto &g) { g.a[0] = x; });
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= set[i].a[0] << i;
    return bits;
}
DEVICE void load_matrices(u32 (&r)[4], const void *row) {
    int lane = machine->now->thread & 31;
    auto *set = exchange([&](auto &g) { g.row = row; });
    for (int m = 0; m < 4; ++m) memcpy(r + m, (const char *)set[m * 8 + lane / 4].row + lane % 4 * 4, 4);
}
DEVICE void load_turned(u32 (&r)[2], const void *row) {
    int lane = machine->now->thread & 31;
    auto *set = exchange([&](auto &g) { g.row = row; });
    for (int m = 0; m < 2; ++m) {
        unsigned short two[2];
        for (int i = 0; i < 2; ++i)
            memcpy(two + i, (const char *)set[m * 8 + lane % 4 * 2 + i].row + lane / 4 * 2, 2);
        memcpy(r + m, two, 4);
    }
}
static float half_of(u32 two, int which) { return __uint_as_float(which ? two & 0xffff0000u : two << 16); }
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    int lane = machine->now->thread & 31;
    auto *set = exchange([&](auto &g) { memcpy(g.a, a, 16); g.b[0] = b0; g.b[1] = b1; });
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + (i >> 1) * 8, column = lane % 4 * 2 + (i & 1);
        float sum = c[i];
        for (int k = 0; k < 16; ++k) {
            float x = half_of(set[row % 8 * 4 + k % 8 / 2].a[(k / 8) * 2 + row / 8], k & 1);
            float y = half_of(set[column * 4 + k % 8 / 2].b[k / 8], k & 1);
            sum += x * y;
        }
        c[i] = sum;
    }
}

// A barrier for copies: its low word is the round, its high one what is outstanding.
struct Bar { u32 round; unsigned char count, pending; short unused; };
static std::vector<std::pair<u64 *, int>> *outstanding;
static int &bytes_of(u64 *bar) {
    for (auto &each : *outstanding)
        if (each.first == bar) return each.second;
    outstanding->push_back({bar, 0});
    return outstanding->back().second;
}
static void settle(u64 *bar) {
    Bar *b = (Bar *)bar;
    if (b->pending == 0 && bytes_of(bar) == 0) {
        b->pending = b->count;
        ++b->round;
    }
}
DEVICE void mbar_init(u64 *bar, u32 count) { *(Bar *)bar = {0, (unsigned char)count, (unsigned char)count, 0}; }
DEVICE void mbar_publish() {}
DEVICE void mbar_arrive(u64 *bar) { --((Bar *)bar)->pending; settle(bar); }
DEVICE void mbar_expect(u64 *bar, u32 bytes) { bytes_of(bar) += (int)bytes; mbar_arrive(bar); }
DEVICE void mbar_wait(u64 *bar, u32 parity) {
    while ((((Bar *)bar)->round & 1) == parity) yield_now((const u32 *)bar);
}
DEVICE void bulk_copy(void *target, const void *source, u32 bytes, u64 *bar) {
    if (((uintptr_t)target | (uintptr_t)source | bytes) & 15) machine->failed = true;
    machine->copies.push_back({target, source, bytes, bar});
}
static bool copy_one() {
    if (machine->copies.empty()) return false;
    Copy c = machine->copies.front();
    machine->copies.pop_front();
    memcpy(c.target, c.source, c.bytes);
    bytes_of(c.bar) -= (int)c.bytes;
    settle(c.bar);
    return true;
}

DEVICE unsigned short narrow(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
DEVICE u32 multiply_pairs(u32 x, u32 y) {
    u32 low = narrow(half_of(x, 0) * half_of(y, 0)), high = narrow(half_of(x, 1) * half_of(y, 1));
    return low | high << 16;
}
DEVICE void copy_later(void *target, const void *source) { memcpy(target, source, 16); }
DEVICE void wait_for_copies() {}
DEVICE u32 add_and_get(u32 *at, u32 count) { u32 was = *at; *at += count; return was; }
DEVICE u32 load_acquired(const u32 *at) { yield_now(); return *at; }
DEVICE void arrive(u32 *at) { ++*at; }
#define pause yield_now
DEVICE long long cycles() {
    static long long now = 0;
    return ++now;
}
DEVICE void store_word(u64 *at, u64 word) { *at = word; }
DEVICE u64 load_word(const u64 *at) { return *at; }
DEVICE void load_words(u64 (&words)[2], const u64 *at) { words[0] = at[0], words[1] = at[1]; }
DEVICE void fail() { machine->failed = true; }
template <class T> static inline T fresh(const T *at) { return *at; }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float inverse_root(float x) { return 1.0f / sqrtf(x); }

static void fibre_body() {
    kernel_body();
    machine->now->done = true;
    _longjmp(machine->back, 1);
}
static bool is_ready(const Fibre &f) { return !f.done && !(f.watched && *f.watched == f.was); }
static void resume(Fibre &f) {
    machine->now = &f;
    threadIdx.x = f.thread, blockIdx.x = f.block;
    shared_memory = machine->shared[f.block].data();
    shared_memory += (128 - (uintptr_t)shared_memory % 128) % 128;
    if (_setjmp(machine->back)) return;
    if (f.begun) _longjmp(f.at, 1);
    f.begun = true;
    setcontext(&f.start);
}

// Runs a kernel of so many blocks and threads; 0, or 1: it waits for ever, or a copy is not aligned.
static int emulate(int blocks, int consumers, int helpers, int shared_bytes, void (*body)()) {
    Machine here;
    const int threads = consumers + helpers;
    std::vector<std::pair<u64 *, int>> bars;
    machine = &here, outstanding = &bars, kernel_body = body, gridDim.x = blocks;
    here.threads = threads, here.workers = consumers;
    here.fibres.resize((size_t)blocks * threads);
    here.shared.assign(blocks, std::vector<unsigned char>(shared_bytes + 128, 0xff));
    here.warps.resize((size_t)blocks * threads / 32);
    here.all.resize(blocks);
    here.consumers.resize(blocks);
    for (size_t i = 0; i < here.fibres.size(); ++i) {
        Fibre &f = here.fibres[i];
        constexpr size_t size = 48 << 10;
        f.thread = (int)(i % threads), f.block = (int)(i / threads);
        f.stack.reset(new char[size]);
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.get(), f.start.uc_stack.ss_size = size;
        f.start.uc_link = nullptr;
        makecontext(&f.start, fibre_body, 0);
    }
    for (bool busy = true; busy && !here.failed;) {
        busy = false;
        for (size_t i = 0; i < here.fibres.size(); ++i)
            if (is_ready(here.fibres[i])) resume(here.fibres[i]), busy = true;
        for (int i = 0; i < 16; ++i) busy |= copy_one();
    }
    bool waits = false;
    for (auto &f : here.fibres) waits |= !f.done;
    return waits || here.failed;
}
