// A decoding step of 1 to 16 tokens of one row as one kernel, for Hopper.
//
// One block runs on each multiprocessor from the first layer to the logits. The step is a list of
// phases (`Phase`), and all blocks finish a phase before any begins the next:
//
//   a layer:  norm, queries/keys/values, rotation, cache write | attention | (joining) |
//             output product, residual | norm, gate and up, activation | down product, residual
//   then:     final norm, head
//
// Weights do not depend on what is computed. Four warps of a block, the producers, do nothing but ask
// for them: bulk copies into a ring of stages in shared memory, phase after phase, never waiting at a
// barrier between phases. The other warps, the consumers, multiply what has come. So while a block
// waits at a barrier, reads inputs, or attends, weights go on arriving until the ring is full.
//
// The order of sums is fixed. A unit is 16 outputs; one block adds up all their inputs. Chunk after
// chunk of CHUNK inputs, warp w takes the steps w, w + 8, ... of 16 inputs each; the 8 sums are added
// in the order of the warps; inputs beyond SEGMENT are added segment after segment. Tokens are columns
// of a matrix product, which do not touch one another. Attention makes a partial sum of each stretch of
// STRETCH entries of a token's text; they are joined in the order of the text. None of this depends on
// the number of tokens, on which block does it, or on how many blocks there are.
//
// The barrier: each block adds one to a counter in memory, and waits until all have. Blocks run at the
// same time (the launch is cooperative). A wait that takes seconds ends the kernel with an error.
//
// Small results need no barrier. A word of 64 bits holds two of them and the number of the phase that
// made them, and is written at once; whoever needs it reads it until it has that number. A word is
// written anew only behind a barrier that its readers have passed, or by who has read what they wrote.
//
// The same source runs on a CPU, with the threads of `step_emulated.h`: that is how it is tested.
//
// Shape legend: H query heads, G key-value heads, P = H / G, D head size, B entries of a cache block.

#ifdef STEP_EMULATED
#include "step_emulated.h"
#else
typedef unsigned int u32;
typedef unsigned long long u64;
#endif
typedef long long i64;
typedef unsigned short bf16;  // its bits

#ifndef CHUNK
#define CHUNK 1024
#endif
#ifndef SEGMENT
#define SEGMENT 4096  // inputs of all tokens that shared memory holds
#endif
#ifdef SHARED
#define SHARED_OF(s) SHARED
#else
#define SHARED_OF(s) ((s).num_query / (s).num_kv)
#endif
#ifdef HEAD  // known when this is compiled: divisions by it are shifts
#define HEAD_OF(s) HEAD
#define MOST_HEAD ((HEAD + 31) / 32 * 32)
#else
#define HEAD_OF(s) (s).head
#define MOST_HEAD 256
#endif
constexpr u32 PATIENCE = 1u << 22;
constexpr int TOKENS = 16, UNIT = 16, WARPS = 8, THREADS = 32 * WARPS;
constexpr int STRETCH = 128;   // entries of a partial sum of attention
constexpr int HELD = 8;        // units whose sums wait for their next segment
constexpr int BLOCK_ROWS = 64; // of attention, looked at together
constexpr int ROW_BYTES = 2 * CHUNK + 16, STAGE_BYTES = UNIT * ROW_BYTES;  // 16: for the banks
constexpr int MOST_SLICES = 64;  // of 256 inputs that a norm is of
constexpr int MOST_STAGES = 32, RED_TOKEN = 20, CHANCES = STRETCH + 8;
constexpr int PRODUCERS = 4, HELPERS = 32 * PRODUCERS;  // warps; they share the rows of a unit

enum Kind { PRODUCT, ATTEND, JOIN, ROTATE };
enum Flags { NORM = 1, GATED = 2, HEADS = 4, FLOATS = 8, TANH = 16, BEFORE_ATTENTION = 32, JOINED = 64 };

// What all blocks do before they wait for one another. Pointers are null where there is nothing.
struct Phase {
    i64 kind, flags;
    const bf16 *weight, *bias, *norm, *x, *residual;
    const i64 *x_rows, *residual_rows;  // of each token; null: token after token
    const u64 *x_words, *residual_words;
    u64 *out_words;
    void *out;
    bf16 *tap;
    i64 outputs, inputs;   // of a product; gates count, ups do not
    i64 first;             // number of its first unit, counted from the step's first one
    const bf16 *cosines, *sines, *query_norm, *key_norm;
    i64 number, x_number, residual_number;  // of the phase, from 1, and of those that made these; or 0
    i64 layer, window;     // elements from a block's beginning to the layer's; 0: no window
};

struct Step {
    const Phase *phases;
    const i64 *blocks, *offsets, *turns, *starts, *lengths, *paths, *table;  // turns: rows of cosines
    bf16 *keys, *values, *query, *attended;
    float *sums, *peaks;   // [16, H, stretches, D] and [16, H, stretches, 2]
    u64 *sum_words, *peak_words;
    u32 *counters;         // arrived, left, launches
    i64 *trace;            // [blocks, phases, 3] cycles: begun, inputs read, done; or null
    i64 block_stride;
    int num_phases, num_query, num_kv, head, block, rotated;
    int row_tokens, is_chain, num_stretches, most_inputs, join_limit, word_limit, shared_bytes;
    float eps, residual_scale, query_scale;
};

// ------------------------------------------------------------------------------------ the device

#ifndef STEP_EMULATED
#define DEVICE __device__ __forceinline__
#define METHOD DEVICE
extern __shared__ __align__(128) unsigned char shared_memory[];

DEVICE u32 at_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }
// A warp must come as one: lanes that waited for words one by one would count several times.
DEVICE void sync_consumers() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
DEVICE void mbar_init(u64 *bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at_shared(bar)), "r"(count) : "memory");
}
DEVICE void mbar_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbar_expect(u64 *bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at_shared(bar)), "r"(bytes)
                 : "memory");
}
DEVICE void mbar_arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at_shared(bar)) : "memory");
}
DEVICE void mbar_wait(u64 *bar, u32 parity) {
    u32 done = 0;
    for (u32 tries = 0; !done; ++tries) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            "  selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(at_shared(bar)), "r"(parity) : "memory");
        if (tries > PATIENCE) __trap();
    }
}
DEVICE void bulk_copy(void *target, const void *source, u32 bytes, u64 *bar) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(at_shared(target)), "l"(source), "r"(bytes), "r"(at_shared(bar)), "l"(policy) : "memory");
}
DEVICE void copy_later(void *target, const void *source) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at_shared(target)), "l"(source) : "memory");
}
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void load_matrices(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at_shared(row)) : "memory");
}
DEVICE void load_turned(u32 (&r)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(at_shared(row)) : "memory");
}
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 vote(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE bf16 narrow(float x) {
    bf16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
DEVICE u32 add_and_get(u32 *at, u32 count) { return atomicAdd(at, count); }
DEVICE u32 load_acquired(const u32 *at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
DEVICE void arrive(u32 *at) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
DEVICE u32 multiply_pairs(u32 x, u32 y) {
    u32 products;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(x), "r"(y));
    return products;
}
DEVICE i64 cycles() { return clock64(); }
DEVICE void fail() { __trap(); }
DEVICE void store_word(u64 *at, u64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}
DEVICE u64 load_word(const u64 *at) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}
DEVICE void load_words(u64 (&words)[2], const u64 *at) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[0]), "=l"(words[1]) : "l"(at) : "memory");
}
// What other blocks wrote in this launch is read from where they wrote it, never from an L1 cache.
DEVICE uint4 fresh(const uint4 *at) { return __ldcg(at); }
DEVICE float4 fresh(const float4 *at) { return __ldcg(at); }
DEVICE float2 fresh(const float2 *at) { return __ldcg(at); }
DEVICE float fresh(const float *at) { return __ldcg(at); }
DEVICE bf16 fresh(const bf16 *at) { return __ldcg(at); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float inverse_root(float x) { return 1.0f / sqrtf(x); }
#endif

DEVICE void wait_a_little(u32 tries) {
    if (tries > PATIENCE) fail();
#ifdef STEP_EMULATED
    pause();
#endif
}
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x << 16); }
DEVICE u32 pair(float low, float high) { return (u32)narrow(low) | (u32)narrow(high) << 16; }
DEVICE float low(u32 two) { return __uint_as_float(two << 16); }
DEVICE float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
DEVICE u32 cancelled(u32 two) {  // numbers that are not finite become 0
    if ((two & 0x7f80u) == 0x7f80u) two &= 0xffff0000u;
    if ((two & 0x7f800000u) == 0x7f800000u) two &= 0x0000ffffu;
    return two;
}
#define MINUS_INFINITY __uint_as_float(0xff800000u)

// -------------------------------------------------------------------------------------- the block

struct Ring {
    unsigned char *stages;
    u64 *full, *empty;
    int count, at;
    u32 turn;
    METHOD unsigned char *stage() const { return stages + at * STAGE_BYTES; }
    METHOD void next() {
        if (++at == count) at = 0, turn ^= 1;
    }
};

// Shared memory, and what a thread knows of itself.
struct Block {
    Phase *phases;         // [2] the one at work, and the next or the last one
    int *seen;             // [16] entries that each token sees
    float *squares;        // [16 tokens, MOST_SLICES]
    float *red;            // [2, 8 warps, 16 tokens, RED_TOKEN] sums of a unit
    float2 *held;          // [HELD, 128 threads]
    i64 *places;           // [STRETCH] of the first tile that the block attends to
    unsigned char *work;   // inputs of a product, or what attention needs
    int x_stride;          // bytes of a token's inputs
    int count, start, most;  // tokens; entries that all see; entries that the last one sees
    int thread, warp, lane, block, blocks;
    u32 target;            // of the barrier's counter
    u32 epoch;             // number of all phases before this launch
    int turn;              // which half of `red`
};

DEVICE void note(const Step &s, const Block &b, int phase, int what) {
    if (s.trace && b.thread == 0) s.trace[((i64)b.block * s.num_phases + phase) * 3 + what] = cycles();
}

DEVICE int units_of(const Phase &p) {
    return (int)((p.flags & GATED) ? p.outputs / 8 : (p.outputs + UNIT - 1) / UNIT);
}
DEVICE int most_of(const Phase &p) { return (int)((p.flags & GATED) ? 2 * p.outputs : p.outputs); }
DEVICE int first_unit(const Phase &p, int block, int blocks) {
    int behind = block - (int)((u32)p.first % (u32)blocks);
    return behind < 0 ? behind + blocks : behind;
}

// The weights' row of output r of a unit. Outputs r and r + 8 belong together: a gate and its up, or
// the two numbers of a head that are rotated by one angle.
DEVICE int row_of(const Step &s, const Phase &p, int unit, int r) {
    if (p.flags & GATED) return (r < 8 ? 0 : (int)p.outputs) + unit * 8 + (r & 7);
    if (!(p.flags & HEADS)) return unit * UNIT + r;
    int units = HEAD_OF(s) / UNIT, first = unit / units * HEAD_OF(s), at = unit % units, half = s.rotated / 2;
    if (at * 8 < half) return first + at * 8 + (r & 7) + (r < 8 ? 0 : half);
    return first + at * UNIT + r;
}

// ----------------------------------------------------------------------------------- the producer

// One copy after another takes a warp a hundred cycles and more, so several warps share a unit's rows.
DEVICE void produce(const Step &s, const Block &b, Ring ring) {
    constexpr int OWN = UNIT / PRODUCERS;
    const int r = (b.warp - WARPS) * OWN + b.lane;
#pragma unroll 1
    for (int i = 0; i < s.num_phases; ++i) {
        const Phase &p = s.phases[i];
        if (p.kind != PRODUCT) continue;
        int units = units_of(p), inputs = (int)p.inputs, most = most_of(p), group = HELD * b.blocks;
#pragma unroll 1
        for (int first = first_unit(p, b.block, b.blocks); first < units; first += group)
#pragma unroll 1
            for (int segment = 0; segment < inputs; segment += SEGMENT)
#pragma unroll 1
                for (int unit = first; unit < min(units, first + group); unit += b.blocks) {
                    int row = b.lane < OWN ? row_of(s, p, unit, r) : most;
                    u32 rows = __popc(vote(row < most));
                    const bf16 *source = p.weight + (i64)row * inputs;
#pragma unroll 1
                    for (int k = segment; k < min(inputs, segment + SEGMENT); k += CHUNK) {
                        u32 bytes = 2 * min(CHUNK, inputs - k);
                        if (b.lane == 0) {
                            mbar_wait(ring.empty + ring.at, ring.turn ^ 1);
                            mbar_expect(ring.full + ring.at, rows * bytes);
                        }
                        sync_warp();
                        if (row < most)
                            bulk_copy(ring.stage() + r * ROW_BYTES, source + k, bytes, ring.full + ring.at);
                        ring.next();
                    }
                }
    }
}

// ------------------------------------------------------------------------------------- products

DEVICE int stretches_of(int entries) { return (entries + STRETCH - 1) / STRETCH; }
DEVICE int first_stretch(const Phase &p, int seen) {
    return p.window && seen > p.window ? (int)(seen - p.window) / STRETCH : 0;
}
// Few sums of attention are joined by each block that reads them, many by all blocks in a phase.
DEVICE bool joins_inputs(const Step &s, const Block &b) {
    return b.count * stretches_of(b.most) * s.num_query * HEAD_OF(s) <= s.join_limit;
}

DEVICE bool sums_in_words(const Step &s, const Block &b) { return s.word_limit > 0 && joins_inputs(s, b); }

// N numbers of up to four stretches from words; false: they are not made yet.
template <int N>
DEVICE bool try_sums(const Step &s, i64 place, int count, int dim, u32 number, float2 (&tops)[4], float (&parts)[4][N]) {
    bool all = true;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        tops[j] = make_float2(MINUS_INFINITY, 0.0f);
#pragma unroll
        for (int n = 0; n < N; ++n) parts[j][n] = 0.0f;
        if (j >= count) continue;
        u64 two[2];
        load_words(two, s.peak_words + 2 * (place + j));
        all &= (two[0] >> 32) == number && (two[1] >> 32) == number;
        tops[j] = make_float2(__uint_as_float((u32)two[0]), __uint_as_float((u32)two[1]));
#pragma unroll
        for (int n = 0; n < N - 1; n += 2) {
            load_words(two, s.sum_words + (place + j) * HEAD_OF(s) + dim + n);
            all &= (two[0] >> 32) == number && (two[1] >> 32) == number;
            parts[j][n] = __uint_as_float((u32)two[0]), parts[j][n + 1] = __uint_as_float((u32)two[1]);
        }
    }
    return all;
}

// N numbers of a head, from `dim` on: the sums of its stretches joined, four at once, in their order.
template <int N>
DEVICE void join(const Step &s, const Block &b, const Phase &p, int token, int head, int dim, float (&total)[N]) {
    int end = stretches_of(b.seen[token]);
    i64 at = ((i64)token * s.num_query + head) * s.num_stretches;
    const float *sums = s.sums + at * HEAD_OF(s) + dim;
    const float2 *peaks = (const float2 *)s.peaks + at;
    const u32 number = b.epoch + (u32)p.x_number;
    const bool words = p.x_number && sums_in_words(s, b);
    const i64 place = (i64)(token * s.num_query + head) * stretches_of(b.most);
    float peak = MINUS_INFINITY, weight = 0.0f;
    for (int n = 0; n < N; ++n) total[n] = 0.0f;
#pragma unroll 1
    for (int i = first_stretch(p, b.seen[token]); i < end; i += 4) {
        float2 tops[4];
        float parts[4][N];
        if (words) {
#pragma unroll 1
            for (u32 tries = 0; !try_sums(s, place + i, end - i, dim, number, tops, parts); ++tries)
                wait_a_little(tries);
        } else
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            tops[j] = i + j < end ? fresh(peaks + i + j) : make_float2(MINUS_INFINITY, 0.0f);
#pragma unroll
            for (int n = 0; n < N; n += N < 4 ? 1 : 4) {
                const float *part = sums + (i64)(i + j) * HEAD_OF(s) + n;
                if (N < 4) parts[j][n] = i + j < end ? fresh(part) : 0.0f;
                else *(float4 *)(parts[j] + n) = i + j < end ? fresh((const float4 *)part) : make_float4(0, 0, 0, 0);
            }
        }
        float higher = peak;
#pragma unroll
        for (int j = 0; j < 4; ++j) higher = fmaxf(higher, tops[j].x);
        float level = higher == MINUS_INFINITY ? 0.0f : higher, fade = exponential(peak - level);
        weight *= fade;
#pragma unroll
        for (int n = 0; n < N; ++n) total[n] *= fade;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            fade = exponential(tops[j].x - level);
            weight = fmaf(tops[j].y, fade, weight);
#pragma unroll
            for (int n = 0; n < N; ++n) total[n] = fmaf(parts[j][n], fade, total[n]);
        }
        peak = higher;
    }
    for (int n = 0; n < N; ++n) total[n] /= weight;
}

// Whether so many results of each token travel as words.
DEVICE bool in_words(const Step &s, const Block &b, i64 results) { return b.count * results <= s.word_limit; }

// Eight inputs of a token from words; false: they are not made yet.
DEVICE bool try_words(const u64 *at, u32 number, uint4 &x) {
    u64 first[2], second[2];
    load_words(first, at);
    load_words(second, at + 2);
    x = make_uint4((u32)first[0], (u32)first[1], (u32)second[0], (u32)second[1]);
    return (first[0] >> 32) == number && (first[1] >> 32) == number && (second[0] >> 32) == number
           && (second[1] >> 32) == number;
}

// Inputs that are what a token saw, joined from its stretches.
DEVICE void load_joined(const Step &s, const Block &b, const Phase &p, int segment, int length) {
    sync_consumers();  // nobody reads what was there
#pragma unroll 1
    for (int i = b.thread; i < b.count * (length / 8); i += THREADS) {
        int token = i / (length / 8), v = i % (length / 8), at = segment + v * 8;
        float x[8];
        join(s, b, p, token, at / HEAD_OF(s), at % HEAD_OF(s), x);
        *((uint4 *)(b.work + token * b.x_stride) + v) =
            make_uint4(pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7]));
    }
    sync_consumers();
}

// Where a token's inputs are: how many elements from the first.
DEVICE i64 place_of(const Phase &p, int token, int at) {
    return (p.x_rows ? p.x_rows[token] : token) * p.inputs + at;
}

// Inputs of all tokens, as they are.
DEVICE void copy_inputs(const Step &s, const Block &b, const Phase &p, int segment, int vectors) {
    const int items = b.count * vectors;
    if (!p.x_words || !in_words(s, b, p.inputs)) {
#pragma unroll 1
        for (int token = 0; token < b.count; ++token) {
            const uint4 *source = (const uint4 *)(p.x + place_of(p, token, segment));
            uint4 *target = (uint4 *)(b.work + token * b.x_stride);
#pragma unroll 1
            for (int at = b.thread; at < vectors; at += THREADS) copy_later(target + at, source + at);
        }
        wait_for_copies();
        return;
    }
    const u32 number = b.epoch + (u32)p.x_number;
#pragma unroll 1
    for (int begin = b.thread; begin < items; begin += 4 * THREADS) {
        uint4 x[4];
        bool all = false;
#pragma unroll 1
        for (u32 tries = 0; !all; ++tries) {
            all = true;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int i = begin + j * THREADS;
                if (i >= items) continue;
                i64 place = place_of(p, i / vectors, segment + i % vectors * 8);
                all &= try_words(p.x_words + place / 2, number, x[j]);
            }
            if (!all) wait_a_little(tries);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int i = begin + j * THREADS;
            if (i < items) *((uint4 *)(b.work + i / vectors * b.x_stride) + i % vectors) = x[j];
        }
    }
}

// Inputs of all tokens, times the norm's weights where there is one, and the sums of their squares.
// A slice is 256 inputs of a token; a warp takes one after another.
DEVICE void load_inputs(const Step &s, const Block &b, const Phase &p, int segment, int length) {
    const int vectors = length / 8, slices = (vectors + 31) / 32, items = b.count * slices;
    const uint4 *norm = (const uint4 *)(p.norm + segment);
    uint4 first = make_uint4(0, 0, 0, 0);  // asked for early
    const bool normed = p.flags & NORM;
    if (normed && b.warp < items && b.warp % slices * 32 + b.lane < vectors)
        first = norm[b.warp % slices * 32 + b.lane];
    sync_consumers();  // nobody reads what was there
    copy_inputs(s, b, p, segment, vectors);
    sync_consumers();
    if (!normed) return;
    int token = b.warp / slices, slice = b.warp % slices;
#pragma unroll 1
    for (int begin = b.warp; begin < items; begin += 4 * WARPS) {
        uint4 x[4], n[4], *places[4];
        float squares[4], *sums[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // four at once, as each waits for its own sums
#pragma unroll 1
            while (slice >= slices) slice -= slices, ++token;
            const int at = slice * 32 + b.lane;
            const bool is_one = begin + j * WARPS < items, inside = is_one && at < vectors;
            places[j] = inside ? (uint4 *)(b.work + token * b.x_stride) + at : nullptr;
            sums[j] = is_one ? b.squares + token * MOST_SLICES + segment / 256 + slice : nullptr;
            x[j] = inside ? *places[j] : make_uint4(0, 0, 0, 0);
            n[j] = begin + j == b.warp || !inside ? first : norm[at];
            slice += WARPS;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            squares[j] = low(x[j].x) * low(x[j].x) + high(x[j].x) * high(x[j].x);
            squares[j] += low(x[j].y) * low(x[j].y), squares[j] += high(x[j].y) * high(x[j].y);
            squares[j] += low(x[j].z) * low(x[j].z), squares[j] += high(x[j].z) * high(x[j].z);
            squares[j] += low(x[j].w) * low(x[j].w), squares[j] += high(x[j].w) * high(x[j].w);
        }
#pragma unroll
        for (int mask = 16; mask; mask >>= 1)
#pragma unroll
            for (int j = 0; j < 4; ++j) squares[j] += shuffle_xor(squares[j], mask);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (b.lane == 0 && sums[j]) *sums[j] = squares[j];
            if (places[j])
                *places[j] = make_uint4(multiply_pairs(x[j].x, n[j].x), multiply_pairs(x[j].y, n[j].y),
                                        multiply_pairs(x[j].z, n[j].z), multiply_pairs(x[j].w, n[j].w));
        }
    }
    sync_consumers();
}

DEVICE float norm_factor(const Step &s, const Block &b, const Phase &p, int token) {
    if (!(p.flags & NORM)) return 1.0f;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < ((int)p.inputs + 255) / 256; ++i) sum += b.squares[token * MOST_SLICES + i];
    return inverse_root(sum / (float)p.inputs + s.eps);
}

// Where a head's numbers go: queries to a buffer, keys and values to the cache.
DEVICE bf16 *home_of(const Step &s, const Phase &p, int token, int head) {
    if (head < s.num_query) return s.query + ((i64)token * s.num_query + head) * HEAD_OF(s);
    int group = (head - s.num_query) % s.num_kv;
    bf16 *store = head < s.num_query + s.num_kv ? s.keys : s.values;
    i64 entry = s.blocks[token] * s.block_stride + p.layer;
    return store + entry + ((i64)group * s.block + s.offsets[token]) * HEAD_OF(s);
}

// Two numbers of a head with their bias, rotated; as numbers that bf16 holds.
DEVICE void finish_heads(const Step &s, const Phase &p, int row, int other, int token, float &x, float &y) {
    if (p.bias) x += widen(p.bias[row]), y += widen(p.bias[other]);
    x = widen(narrow(x)), y = widen(narrow(y));
    int head = row / HEAD_OF(s), at = row % HEAD_OF(s);
    if (p.cosines && head < s.num_query + s.num_kv && at < s.rotated / 2) {
        i64 turn = s.turns[token] * s.rotated + at;
        const bf16 *cosine = p.cosines + turn, *sine = p.sines + turn;
        int half = s.rotated / 2;
        float turned = x * widen(cosine[0]) + y * widen(sine[0]);
        y = y * widen(cosine[half]) + x * widen(sine[half]);
        x = turned;
    }
    bf16 *home = home_of(s, p, token, head);
    home[at] = narrow(x);
    home[other % HEAD_OF(s)] = narrow(y);
}

DEVICE float activated(const Phase &p, float x) {
    if (!(p.flags & TANH)) return x / (1.0f + exponential(-x));
    float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (2.0f - 2.0f / (1.0f + exponential(2.0f * inner)));
}

// A result behind its product; as a number that bf16 holds, but for logits.
DEVICE float finish_one(const Step &s, const Phase &p, int row, int token, float x, float residual) {
    if (p.flags & FLOATS) {
        if (row < p.outputs) ((float *)p.out)[(i64)token * p.outputs + row] = x;
        return x;
    }
    if (p.bias && row < p.outputs) x += widen(p.bias[row]);
    if (p.residual) x = x * s.residual_scale + residual;
    bf16 bits = narrow(x);
    if (p.tap && row < p.outputs) p.tap[(i64)token * p.outputs + row] = bits;
    return widen(bits);
}

// Read before the sums are made, as they take as long.
DEVICE float2 residual_of(const Step &s, const Block &b, const Phase &p, int unit, int r, int token) {
    float2 found = make_float2(0.0f, 0.0f);
    if (!p.residual) return found;
    i64 first = p.residual_rows ? p.residual_rows[token] : token;
    i64 place = first * p.outputs + unit * UNIT + r;
    if (p.residual_number && in_words(s, b, p.outputs)) {
        const u64 *at = p.residual_words + place / 2;
        u32 number = b.epoch + (u32)p.residual_number;
        u64 x = load_word(at), y = load_word(at + 4);
#pragma unroll 1
        for (u32 tries = 0; (x >> 32) != number || (y >> 32) != number; ++tries) {
            wait_a_little(tries);
            x = load_word(at), y = load_word(at + 4);
        }
        return r & 1 ? make_float2(high((u32)x), high((u32)y)) : make_float2(low((u32)x), low((u32)y));
    }
    const bf16 *at = p.residual + place;
    if (unit * UNIT + r < p.outputs) found.x = widen(fresh(at));
    if (unit * UNIT + r + 8 < p.outputs) found.y = widen(fresh(at + 8));
    return found;
}

// All lanes of a warp come here: the results of two neighbours are one word.
DEVICE void finish(const Step &s, const Block &b, const Phase &p, int unit, int r, int token, float x, float y,
                   float2 residual) {
    const bool is_token = token < b.count, gated = p.flags & GATED, heads = p.flags & HEADS;
    int row = gated ? unit * 8 + r : row_of(s, p, unit, r), below = gated ? row : row_of(s, p, unit, r + 8);
    if (gated) {
        x = widen(narrow(activated(p, x) * y));
    } else if (is_token && heads) {
        finish_heads(s, p, row, below, token, x, y);
    } else if (is_token) {
        x = finish_one(s, p, row, token, x, residual.x);
        y = finish_one(s, p, below, token, y, residual.y);
    }
    if (p.flags & FLOATS) return;
    if (!p.out_words || !in_words(s, b, p.outputs)) {
        bf16 *out = (bf16 *)p.out + (i64)token * p.outputs;
        if (is_token && !heads && row < p.outputs) out[row] = narrow(x);
        if (is_token && !heads && !gated && below < p.outputs) out[below] = narrow(y);
        return;
    }
    const bool odd = r & 1;  // of outputs r + 8, the others of outputs r
    float other = shuffle_xor(odd ? x : y, 1);
    if (!is_token || (gated && odd)) return;
    u64 word = odd ? pair(other, y) : pair(x, other);
    int place = odd ? below - 1 : row;
    if (place < p.outputs)
        store_word(p.out_words + ((i64)token * p.outputs + place) / 2, word | (u64)(b.epoch + (u32)p.number) << 32);
}

// A warp's share of the sums of a unit over the chunks of a segment.
DEVICE void add_up(const Block &b, Ring &ring, float (&sums)[2][4], int segment, int end) {
    const unsigned char *x = b.work + ((b.lane & 7) + (b.lane >> 4) * 8) * b.x_stride
                             + ((b.lane >> 3) & 1) * 16 + b.warp * 32;
    int weight = (b.lane & 15) * ROW_BYTES + (b.lane >> 4) * 16 + b.warp * 32;
#pragma unroll 1
    for (int k = segment; k < end; k += CHUNK) {
        int steps = min(CHUNK, end - k) / 16;
        mbar_wait(ring.full + ring.at, ring.turn);
        sync_warp();  // products of matrices are a whole warp's
        const unsigned char *w = ring.stage() + weight;
#pragma unroll
        for (int i = 0; i < CHUNK / 16 / WARPS; ++i) {
            if (i * WARPS + b.warp >= steps) continue;
            u32 a[4], c[4];
            load_matrices(a, w + i * WARPS * 32);
            load_matrices(c, x + i * WARPS * 32);
            multiply(sums[0], a, c[0], c[1]);
            if (b.count > 8) multiply(sums[1], a, c[2], c[3]);
        }
        x += 2 * CHUNK;
        sync_warp();
        if (b.lane == 0) mbar_arrive(ring.empty + ring.at);
        ring.next();
    }
}

DEVICE void run_product(const Step &s, Block &b, const Phase &p, Ring &ring, int number) {
    int units = units_of(p), inputs = (int)p.inputs, group = HELD * b.blocks;
    int begin = first_unit(p, b.block, b.blocks);
    int token = b.thread >> 3, r = b.thread & 7;
    const bool finishes = b.warp < TOKENS / 4;
    float factor = 1.0f;
#pragma unroll 1
    for (int first = begin; first < units; first += group)
#pragma unroll 1
        for (int segment = 0; segment < inputs; segment += SEGMENT) {
            int end = min(inputs, segment + SEGMENT), kept = 0;
            if (first == begin || inputs > SEGMENT) {
                if ((p.flags & JOINED) && joins_inputs(s, b)) load_joined(s, b, p, segment, end - segment);
                else load_inputs(s, b, p, segment, end - segment);
                if (finishes) factor = norm_factor(s, b, p, token);
                if (first == begin && segment == 0) note(s, b, number, 1);
            }
#pragma unroll 1
            for (int unit = first; unit < min(units, first + group); unit += b.blocks, ++kept) {
                float sums[2][4] = {};
                float2 residual = make_float2(0.0f, 0.0f);
                if (finishes && token < b.count && end == inputs) residual = residual_of(s, b, p, unit, r, token);
                add_up(b, ring, sums, segment, end);
                float *red = b.red + b.turn * (WARPS * TOKENS * RED_TOKEN);
                float *own = red + b.warp * (TOKENS * RED_TOKEN) + (b.lane & 3) * 2 * RED_TOKEN
                             + (b.lane >> 2);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    if (n * 8 >= b.count) continue;
                    float *at = own + n * 8 * RED_TOKEN;
                    at[0] = sums[n][0], at[RED_TOKEN] = sums[n][1];
                    at[8] = sums[n][2], at[RED_TOKEN + 8] = sums[n][3];
                }
                sync_consumers();
                b.turn ^= 1;
                if (!finishes) continue;
                float x = 0.0f, y = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    x += red[(w * TOKENS + token) * RED_TOKEN + r];
                    y += red[(w * TOKENS + token) * RED_TOKEN + r + 8];
                }
                float2 *held = b.held + kept * (8 * TOKENS) + b.thread;
                if (segment > 0) x += held->x, y += held->y;
                if (end < inputs) *held = make_float2(x, y);
                else finish(s, b, p, unit, r, token, x * factor, y * factor, residual);
            }
        }
}

// ------------------------------------------------------------------------------------- attention

// What a block attends to at once: a stretch, for a group of heads of some tokens.
struct Tile {
    int group, stretch, first, tokens;
};
// A tree's nodes share the stretches that are committed; behind them each has a text of its own.
DEVICE int shared_stretches(const Step &s, const Block &b) {
    return s.is_chain ? stretches_of(b.most) : b.start / STRETCH;
}
DEVICE int tiles_of(const Step &s, const Block &b) {  // of a group
    int shared = shared_stretches(s, b);
    return shared + (stretches_of(b.most) - shared) * b.count;
}
DEVICE Tile tile_of(const Step &s, const Block &b, int item) {
    int group = item % s.num_kv, at = item / s.num_kv, behind = at - shared_stretches(s, b);
    if (behind < 0 || s.is_chain) return {group, at, 0, b.count};
    return {group, at - behind + behind / b.count, behind % b.count, 1};
}
DEVICE int keys_of(const Block &b, const Tile &tile) {
    int most = 0;
#pragma unroll 1
    for (int t = tile.first; t < tile.first + tile.tokens; ++t) most = max(most, b.seen[t]);
    return min(STRETCH, most - tile.stretch * STRETCH);
}

// Where a tile's entries are in a layer; -1 behind the last one.
DEVICE void find_places(const Step &s, const Block &b, const Tile &tile, i64 *places) {
    if (b.thread >= STRETCH) return;
    i64 entry = tile.stretch * STRETCH + b.thread, place = -1;
    if (b.thread < keys_of(b, tile)) {
        if (entry >= b.start) entry = b.start + s.paths[(i64)tile.first * s.row_tokens + entry - b.start];
        place = s.table[entry / s.block] * s.block_stride
                + ((i64)tile.group * s.block + entry % s.block) * HEAD_OF(s);
    }
    places[b.thread] = place;
}

DEVICE bool is_own(const Block &b, int entry) { return entry >= b.start; }

// A stretch as a tile of tokens sees it: for each token and head the sum of values, the peak of the
// scores, and the sum of their exponentials. Warp w scores 16 keys, then sums some dimensions.
DEVICE void attend_stretch(const Step &s, const Block &b, const Phase &p, const Tile &tile_, bool is_first) {
    const int group = tile_.group, stretch = tile_.stretch, first = tile_.first, tokens = tile_.tokens;
    int begin = stretch * STRETCH, keys = keys_of(b, tile_), least = 1 << 30;
#pragma unroll 1
    for (int t = first; t < first + tokens; ++t) least = min(least, b.seen[t]);
    if (keys <= 0 || (p.window && least - (int)p.window >= begin + STRETCH)) return;
    const int D = HEAD_OF(s), shared = SHARED_OF(s), rows = tokens * shared;
    const int padded = (D + 31) / 32 * 32, v_row = D + 8, q_row = padded + 8;
    i64 *places = (i64 *)b.work;                                        // [STRETCH]
    float *peaks = (float *)(places + STRETCH);                         // [8 warps, BLOCK_ROWS]
    float *weights = peaks + WARPS * BLOCK_ROWS;                        // [8 warps, BLOCK_ROWS]
    bf16 *values = (bf16 *)(weights + WARPS * BLOCK_ROWS);              // [STRETCH, v_row]
    bf16 *queries = values + STRETCH * v_row;                           // [BLOCK_ROWS, q_row]
    bf16 *own_keys = queries + BLOCK_ROWS * q_row;                      // [16, v_row]
    bf16 *chances = own_keys + TOKENS * v_row;                          // [BLOCK_ROWS, CHANCES]
    const int window = p.window ? (int)p.window : 1 << 30;
    const bool words = p.x_number && in_words(s, b, p.inputs), sums_words = sums_in_words(s, b);
    const u32 number = b.epoch + (u32)p.x_number;
    const u64 made = (u64)(b.epoch + (u32)p.number) << 32;
    const i64 stretches = stretches_of(b.most);
    sync_consumers();  // nobody reads what was there
    if (is_first) {
        places = b.places;
    } else {
        find_places(s, b, tile_, places);
        sync_consumers();
    }

    // Keys straight to registers: of each 32 dimensions a thread holds 8 in a row, and of queries
    // the same ones, so that both stand in the same places of the product.
    uint4 key[2][MOST_HEAD / 32];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        i64 place = places[b.warp * 16 + n * 8 + (b.lane >> 2)];
#pragma unroll
        for (int i = 0; i < MOST_HEAD / 32; ++i) {
            int dim = i * 32 + (b.lane & 3) * 8;
            key[n][i] = make_uint4(0, 0, 0, 0);
            if (place >= 0 && dim < D && !(words && is_own(b, begin + b.warp * 16 + n * 8 + (b.lane >> 2))))
                key[n][i] = fresh((const uint4 *)(s.keys + p.layer + place + dim));
        }
    }
#pragma unroll 4
    for (int i = b.thread; i < STRETCH * (D / 8); i += THREADS) {
        int at = i / (D / 8), dim = i % (D / 8) * 8;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (words && begin + at >= b.start && at < keys) continue;  // it comes below
        if (places[at] >= 0) value = fresh((const uint4 *)(s.values + p.layer + places[at] + dim));
        // Weights of 0 must cancel a sibling that is not finite; it knows itself by its scores.
        if (begin + at >= b.start)
            value = make_uint4(cancelled(value.x), cancelled(value.y), cancelled(value.z), cancelled(value.w));
        *(uint4 *)(values + at * v_row + dim) = value;
    }
    if (words) {  // own keys and values
        int oldest = max(begin, b.start), own = begin + keys - oldest, vectors = D / 8;
#pragma unroll 1
        for (int i = b.thread; i < 2 * own * vectors; i += THREADS) {
            int kind = i / (own * vectors), at = i / vectors % own, dim = i % vectors * 8;
            i64 token = s.paths[(i64)first * s.row_tokens + oldest - b.start + at];
            const u64 *from = p.x_words + (token * p.inputs + (s.num_query + kind * s.num_kv + group) * D + dim) / 2;
            uint4 x;
#pragma unroll 1
            for (u32 tries = 0; !try_words(from, number, x); ++tries) wait_a_little(tries);
            if (kind) x = make_uint4(cancelled(x.x), cancelled(x.y), cancelled(x.z), cancelled(x.w));
            *(uint4 *)((kind ? values + (oldest - begin + at) * v_row : own_keys + at * v_row) + dim) = x;
        }
    }
#pragma unroll 1
    for (int block = 0; block < rows; block += BLOCK_ROWS) {
        int block_rows = min(BLOCK_ROWS, rows - block), tiles = (block_rows + 15) / 16;
#pragma unroll 2
        for (int i = b.thread; i < tiles * 16 * (padded / 8); i += THREADS) {
            int row = i / (padded / 8), dim = i % (padded / 8) * 8, at = block + row;
            uint4 query = make_uint4(0, 0, 0, 0);
            if (row < block_rows && dim < D) {
                i64 place = (i64)(first + at / shared) * s.num_query + group * shared + at % shared;
                if (!words) {
                    query = fresh((const uint4 *)(s.query + place * D + dim));
                } else {
                    int token = first + at / shared;
                    const u64 *from = p.x_words + (token * p.inputs + (group * shared + at % shared) * D + dim) / 2;
#pragma unroll 1
                    for (u32 tries = 0; !try_words(from, number, query); ++tries) wait_a_little(tries);
                }
            }
            *(uint4 *)(queries + row * q_row + dim) = query;
        }
        sync_consumers();
        if (words && block == 0) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                int at = b.warp * 16 + n * 8 + (b.lane >> 2);
                if (at >= keys || !is_own(b, begin + at)) continue;
                const bf16 *from = own_keys + (begin + at - max(begin, b.start)) * v_row + (b.lane & 3) * 8;
#pragma unroll
                for (int i = 0; i < MOST_HEAD / 32; ++i)
                    if (i * 32 + (b.lane & 3) * 8 < D) key[n][i] = *(const uint4 *)(from + i * 32);
            }
        }
        sync_warp();
        float scores[4][2][4] = {};
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            if (tile >= tiles) continue;
            const bf16 *query = queries + (tile * 16 + (b.lane >> 2)) * q_row + (b.lane & 3) * 8;
#pragma unroll
            for (int i = 0; i < MOST_HEAD / 32; ++i) {
                if (i * 32 >= D) continue;
                uint4 l = *(const uint4 *)(query + i * 32), h = *(const uint4 *)(query + 8 * q_row + i * 32);
                u32 even[4] = {l.x, h.x, l.y, h.y}, odd[4] = {l.z, h.z, l.w, h.w};
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    multiply(scores[tile][n], even, key[n][i].x, key[n][i].y);
                    multiply(scores[tile][n], odd, key[n][i].z, key[n][i].w);
                }
            }
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                int row = tile * 16 + upper * 8 + (b.lane >> 2);
                int seen = row < block_rows ? b.seen[first + (block + row) / shared] : 0;
                float peak = MINUS_INFINITY;
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        int own = begin + b.warp * 16 + n * 8 + (b.lane & 3) * 2 + c;
                        float &score = scores[tile][n][upper * 2 + c];
                        score *= s.query_scale;
                        bool sees = own < seen && own >= seen - window;
                        score = sees ? score : MINUS_INFINITY;
                        peak = fmaxf(peak, score);
                    }
                peak = fmaxf(peak, shuffle_xor(peak, 1));
                peak = fmaxf(peak, shuffle_xor(peak, 2));
                if ((b.lane & 3) == 0) peaks[b.warp * BLOCK_ROWS + row] = peak;
            }
        }
        sync_consumers();
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
            if (tile >= tiles) continue;
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                int row = tile * 16 + upper * 8 + (b.lane >> 2);
                float peak = MINUS_INFINITY, weight = 0.0f;
                for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, peaks[w * BLOCK_ROWS + row]);
                if (peak == MINUS_INFINITY) peak = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    float x = exponential(scores[tile][n][upper * 2] - peak);
                    float y = exponential(scores[tile][n][upper * 2 + 1] - peak);
                    weight += x;
                    weight += y;
                    int at = row * CHANCES + b.warp * 16 + n * 8 + (b.lane & 3) * 2;
                    *(u32 *)(chances + at) = pair(x, y);
                }
                weight += shuffle_xor(weight, 1);
                weight += shuffle_xor(weight, 2);
                if ((b.lane & 3) == 0) weights[b.warp * BLOCK_ROWS + row] = weight;
            }
        }
        sync_consumers();
#pragma unroll 1
        for (int dim = b.warp * 8; dim < D; dim += WARPS * 8) {
            float sums[4][4] = {};
            sync_warp();
#pragma unroll 1
            for (int at = 0; at < keys; at += 16) {
                u32 value[2];
                load_turned(value, values + (at + (b.lane & 15)) * v_row + dim);
#pragma unroll
                for (int tile = 0; tile < 4; ++tile) {
                    if (tile >= tiles) continue;
                    u32 chance[4];
                    load_matrices(chance, chances + (tile * 16 + (b.lane & 15)) * CHANCES + at
                                              + (b.lane >> 4) * 8);
                    multiply(sums[tile], chance, value[0], value[1]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < 4; ++tile)
#pragma unroll
                for (int upper = 0; upper < 2; ++upper) {
                    int row = tile * 16 + upper * 8 + (b.lane >> 2), at = block + row;
                    if (row >= block_rows || b.seen[first + at / shared] <= begin) continue;
                    i64 place = (i64)(first + at / shared) * s.num_query + group * shared + at % shared;
                    if (sums_words) {
                        u64 *to = s.sum_words + (place * stretches + stretch) * D + dim + (b.lane & 3) * 2;
                        store_word(to, made | __float_as_uint(sums[tile][upper * 2]));
                        store_word(to + 1, made | __float_as_uint(sums[tile][upper * 2 + 1]));
                        continue;
                    }
                    place = place * s.num_stretches + stretch;
                    *(float2 *)(s.sums + place * D + dim + (b.lane & 3) * 2) =
                        make_float2(sums[tile][upper * 2], sums[tile][upper * 2 + 1]);
                }
        }
        if (b.thread < block_rows) {
            int at = block + b.thread;
            float peak = MINUS_INFINITY, weight = 0.0f;
            for (int w = 0; w < WARPS; ++w) {
                peak = fmaxf(peak, peaks[w * BLOCK_ROWS + b.thread]);
                weight += weights[w * BLOCK_ROWS + b.thread];
            }
            i64 place = (i64)(first + at / shared) * s.num_query + group * shared + at % shared;
            if (b.seen[first + at / shared] <= begin) continue;
            if (sums_words) {
                u64 *to = s.peak_words + 2 * (place * stretches + stretch);
                store_word(to, made | __float_as_uint(peak));
                store_word(to + 1, made | __float_as_uint(weight));
            } else
                *(float2 *)(s.peaks + 2 * (place * s.num_stretches + stretch)) = make_float2(peak, weight);
        }
    }
}

DEVICE void run_attention(const Step &s, const Block &b, const Phase &p) {
#pragma unroll 1
    for (int item = b.block; item < tiles_of(s, b) * s.num_kv; item += b.blocks)
        attend_stretch(s, b, p, tile_of(s, b, item), item == b.block);
}

// A warp joins 32 numbers of a head.
DEVICE void run_join(const Step &s, const Block &b, const Phase &p) {
    int parts = (HEAD_OF(s) + 31) / 32, items = b.count * s.num_query * parts;
#pragma unroll 1
    for (int i = b.warp * b.blocks + b.block; i < items; i += b.blocks * WARPS) {
        int token = i / parts / s.num_query, head = i / parts % s.num_query;
        int dim = i % parts * 32 + b.lane;
        if (dim >= HEAD_OF(s)) continue;
        float joined[1];
        join(s, b, p, token, head, dim, joined);
        s.attended[((i64)token * s.num_query + head) * HEAD_OF(s) + dim] = narrow(joined[0]);
    }
}

// Heads that are normed before they are rotated, and put where attention looks for them; a warp each.
DEVICE void run_rotate(const Step &s, const Block &b, const Phase &p) {
    int heads = s.num_query + 2 * s.num_kv, half = s.rotated / 2;
#pragma unroll 1
    for (int i = b.warp * b.blocks + b.block; i < b.count * heads; i += b.blocks * WARPS) {
        int token = i / heads, head = i % heads;
        const bf16 *x = p.x + (i64)i * HEAD_OF(s);
        bool turns = head < s.num_query + s.num_kv;
        const bf16 *norm = !turns ? nullptr : head < s.num_query ? p.query_norm : p.key_norm;
        float squares = 0.0f;
#pragma unroll 1
        for (int at = b.lane; at < HEAD_OF(s); at += 32) squares += widen(fresh(x + at)) * widen(fresh(x + at));
        for (int mask = 16; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
        float factor = norm ? inverse_root(squares / (float)HEAD_OF(s) + s.eps) : 1.0f;
        bf16 *home = home_of(s, p, token, head);
#pragma unroll 1
        for (int at = b.lane; at < HEAD_OF(s); at += 32) {
            float own = widen(fresh(x + at)) * factor;
            if (norm) own *= widen(norm[at]);
            if (turns && p.cosines && at < s.rotated) {
                int partner = at < half ? at + half : at - half;
                float other = widen(fresh(x + partner)) * factor;
                if (norm) other *= widen(norm[partner]);
                i64 turn = s.turns[token] * s.rotated + at;
                own = own * widen(p.cosines[turn]) + other * widen(p.sines[turn]);
            }
            home[at] = narrow(own);
        }
    }
}

// ------------------------------------------------------------------------------------- the step

// All blocks have come here before any goes on.
DEVICE void meet(const Step &s, Block &b) {
    sync_consumers();
    if (b.thread == 0) {
        arrive(s.counters);
        b.target += b.blocks;
        u32 tries = 0;
        while ((int)(load_acquired(s.counters) - b.target) < 0)
            if (++tries > PATIENCE) fail();
    }
    sync_consumers();
}

// Copied while the phase before it is at work, which no longer looks where it goes.
DEVICE void fetch_phase(const Step &s, const Block &b, int i) {
    if (i < s.num_phases && b.thread < (int)(sizeof(Phase) / sizeof(i64)))
        ((i64 *)(b.phases + (i & 1)))[b.thread] = ((const i64 *)(s.phases + i))[b.thread];
}

DEVICE void consume(const Step &s, Block &b, Ring ring) {
    fetch_phase(s, b, 0);
    find_places(s, b, tile_of(s, b, b.block), b.places);
    sync_consumers();
#pragma unroll 1
    for (int i = 0; i < s.num_phases; ++i) {
        fetch_phase(s, b, i + 1);
        const Phase &p = b.phases[i & 1];
        if (p.kind == JOIN && joins_inputs(s, b)) {
            sync_consumers();
            continue;
        }
        note(s, b, i, 0);
        if (p.kind == PRODUCT) run_product(s, b, p, ring, i);
        else if (p.kind == ATTEND) run_attention(s, b, p);
        else if (p.kind == JOIN) run_join(s, b, p);
        else run_rotate(s, b, p);
        note(s, b, i, 2);
        if (i + 1 == s.num_phases) continue;
        bool words = p.kind == ATTEND ? sums_in_words(s, b) : p.out_words && in_words(s, b, p.outputs);
        if (!words) {
            meet(s, b);
        } else {
            sync_consumers();
        }
    }
    // The last one to leave puts the counters back.
    sync_consumers();
    if (b.thread == 0 && add_and_get(s.counters + 1, 1) == (u32)b.blocks - 1)
        s.counters[0] = s.counters[1] = 0, ++s.counters[2];
}

extern "C" __global__ void __launch_bounds__(THREADS + HELPERS, 1) step_kernel(const __grid_constant__ Step s) {
    Block b;
    b.thread = threadIdx.x, b.warp = b.thread >> 5, b.lane = b.thread & 31;
    b.block = blockIdx.x, b.blocks = gridDim.x, b.target = 0, b.turn = 0;
    b.epoch = s.counters[2] * (u32)(s.num_phases + 1);
    Ring ring;
    ring.full = (u64 *)shared_memory, ring.empty = ring.full + MOST_STAGES;
    b.seen = (int *)(ring.empty + MOST_STAGES), b.phases = (Phase *)(b.seen + TOKENS);
    b.squares = (float *)(b.phases + 2);
    b.red = b.squares + TOKENS * MOST_SLICES;
    b.held = (float2 *)(b.red + 2 * WARPS * TOKENS * RED_TOKEN);
    b.places = (i64 *)(b.held + HELD * 8 * TOKENS);
    b.work = (unsigned char *)(b.places + STRETCH);

    if (b.thread < TOKENS) b.seen[b.thread] = b.thread < s.row_tokens ? (int)s.lengths[b.thread] : 0;
    __syncthreads();
    b.count = b.most = 0, b.start = (int)s.starts[0];
#pragma unroll 1
    for (int t = 0; t < TOKENS; ++t) b.count += b.seen[t] > 0, b.most = max(b.most, b.seen[t]);

    // What inputs and attention leave is the ring's.
    b.x_stride = 2 * min(SEGMENT, s.most_inputs) + 16;
    int rows = min(BLOCK_ROWS, b.count * SHARED_OF(s));
    rows = (rows + 15) / 16 * 16;
    int attention = STRETCH * 8 + 2 * WARPS * BLOCK_ROWS * 4 + STRETCH * (HEAD_OF(s) + 8) * 2
                    + BLOCK_ROWS * ((HEAD_OF(s) + 31) / 32 * 32 + 8) * 2 + TOKENS * (HEAD_OF(s) + 8) * 2
                    + rows * CHANCES * 2;
    int work = (max(attention, b.count * b.x_stride) + 127) / 128 * 128;
    int used = (int)(b.work - shared_memory);
    ring.stages = b.work + work;
    ring.count = min(MOST_STAGES, (s.shared_bytes - used - work) / STAGE_BYTES);
    ring.at = 0, ring.turn = 0;
    if (b.thread == 0) {
#pragma unroll 1
        for (int i = 0; i < ring.count; ++i) mbar_init(ring.full + i, PRODUCERS), mbar_init(ring.empty + i, WARPS);
        mbar_publish();
    }
    __syncthreads();
    if (b.warp >= WARPS) produce(s, b, ring);
    else consume(s, b, ring);
}

#ifdef STEP_EMULATED
static Step emulated_step;
extern "C" int run_emulated(const Step *s, int blocks) {
    emulated_step = *s;
    return emulate(blocks, THREADS, HELPERS, s->shared_bytes, [] { step_kernel(emulated_step); });
}
#endif
