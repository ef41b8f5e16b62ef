// Products of weights in few bits with activations of 16 bits, or of 8.
//
// Shape legend: T tokens (activation rows), K inputs of a product.
//
// A weight is an integer times the scale of its row's part of 32 or 16 inputs, plus the part's minimum in
// some formats (formats.h); an activation is an integer of 16 bits times the scale of its token, or one of
// 8 bits times the scale of 32 of them. A part's products are summed in int32, which is exact: 32 of them
// stay below 2^29. Parts are then added up in order as float32, one or two multiply-adds each. So an output
// element has the same bits whatever is computed beside it, as matmul.h promises for other weights, and
// whatever instructions multiply (dots.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dots.h"
#include "formats.h"
#include "groups.h"
#include "matmul.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

// Blocks that fit the registers: one group of rows, for memory gives one stream faster than several, and
// so many tokens.
constexpr int kGroupVecs = kGroupRows / kLanes;
constexpr int kPackedBlockTokens = kLanes == 16 ? 8 : 4;

// ---- activations --------------------------------------------------------------------------------

// Activations of all tokens, chunk by chunk, and what belongs to them. Rows are padded with zeros to
// whole chunks. Weights of every format take them.
struct PackedInputs {
  // Of a chunk, rows [T]: the sums of two parts of 32 activations times -128 as whole numbers, where sums
  // of weights with a sign begin; the sums as floats, for minima; those of four parts of 16 times -128; and
  // of activations of 8 bits the scales of both parts of 32, with which the floats are multiplied already;
  // and of the four parts of 16 the sums of each quad's first two and last two, times -32, side by side in
  // 16 bits.
  static constexpr int kStarts = 0, kSums = 2, kFineStarts = 4, kBlockScales = 8, kPairStarts = 10;
  static constexpr int kNumKept = 14;

  // The first of the rows that a format needs, one for each of its parts.
  template <class Format>
  static constexpr int first_kept() {
    static_assert(Format::kStartsAtZero == Format::kHasMinima, "it needs either");
    if (Format::kPartInputs == kFineInputs) return kFineStarts;
    return Format::kHasMinima ? kSums : kStarts;
  }
  // The sum of the activations of a part of a format with minima, where it stands among those rows.
  template <class Format>
  static Vec sum(const int32_t* kept) {
    if (Format::kPartInputs != kFineInputs) return (Vec)repeat(kept);
    return __builtin_convertvector(repeat(kept), Vec) * broadcast(-0x1p-7f);
  }

  int64_t num_tokens, K;
  bool are_eight;   // bits; sixteen
  float* scales;    // [T]
  int32_t* kept;    // [chunks, kNumKept, T]
  int8_t* data;     // [chunks, T, kTokenBytes]

  PackedInputs(float* memory, int64_t num_tokens, int64_t K, bool are_eight)
      : num_tokens(num_tokens),
        K(K),
        are_eight(are_eight),
        scales(memory + weight_chunks(K) * num_tokens * kMostBytes / int64_t(sizeof(float))),
        kept(reinterpret_cast<int32_t*>(scales + num_tokens)),
        data(reinterpret_cast<int8_t*>(memory)) {}

  // Floats of memory.
  static int64_t size(int64_t num_tokens, int64_t K) {
    return num_tokens * (1 + weight_chunks(K) * (kNumKept + kMostBytes / int64_t(sizeof(float))));
  }

  // Takes over a row of K floats that lie in the lane order of `Weight`, zeros behind. A NaN or
  // infinity among them makes the scale NaN, and with it all that is computed from the row.
  template <class Weight>
  void quantise(const float* row, int64_t token) const {
    const Scaled all = scaled(row, are_eight ? 0 : padded(K), Sixteen::kLargest);
    scales[token] = are_eight ? 1.0f : all.scale;
    for (int64_t chunk = 0; chunk < weight_chunks(K); ++chunk) {
      int16_t numbers[kChunkInputs] = {};
      Scaled blocks[2] = {all, all};
      const int64_t first = chunk * kChunkInputs, end = std::min(padded(K) - first, kChunkInputs);
      for (int64_t k = 0; k < end; k += kPair) {
        Scaled& block = blocks[k / kScaleInputs];
        if (are_eight && k % kScaleInputs == 0)
          block = scaled(row + first + k, std::min(end - k, kScaleInputs), Eight::kLargest);
        store_shorts(numbers + k, rounded(load(row + first + k) * block.factor),
                     rounded(load(row + first + k + kLanes) * block.factor),
                     static_cast<const Weight*>(nullptr));
      }
      if (are_eight) put_chunk(numbers, chunk, token, blocks, Eight{});
      else put_chunk(numbers, chunk, token, blocks, Sixteen{});
    }
  }

  // Of `count` of the tokens, number i that of token_of(i), in memory of their own.
  template <class TokenOf>
  PackedInputs gathered(float* memory, int64_t count, const TokenOf& token_of) const {
    const PackedInputs some(memory, count, K, are_eight);
    const int64_t bytes = are_eight ? Eight::kTokenBytes : Sixteen::kTokenBytes;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = token_of(i);
      some.scales[i] = scales[t];
      for (int64_t chunk = 0; chunk < weight_chunks(K); ++chunk)
        std::copy_n(data + (chunk * num_tokens + t) * bytes, bytes, some.data + (chunk * count + i) * bytes);
      for (int64_t row = 0; row < weight_chunks(K) * kNumKept; ++row)
        some.kept[row * count + i] = kept[row * num_tokens + t];
    }
    return some;
  }

 private:
  static constexpr int64_t kMostBytes = Sixteen::kTokenBytes;

  // What integers are to be multiplied with, and what gives them.
  struct Scaled {
    float scale, factor;
  };

  // Of some numbers that become integers up to `most`.
  static Scaled scaled(const float* numbers, int64_t count, int32_t most) {
    // Two running values of each, for an instruction waits for the one before in its chain.
    Vec largest_of[2] = {}, broken[2] = {};
    for (int64_t k = 0; k < count; k += kPair)
      UNROLL for (int i = 0; i < 2; ++i) {
        const Vec x = load(numbers + k + i * kLanes);
        largest_of[i] = max(max(x, -x), largest_of[i]);
        broken[i] = fma(x, Vec{}, broken[i]);
      }
    const float largest = max_lanes(max(largest_of[0], largest_of[1]));
    const bool is_zero = largest < 1e-30f;  // 1 / largest would overflow
    const float spoiled = sum_lanes(broken[0] + broken[1]);  // 0, or a NaN
    return {(is_zero ? 0.0f : largest / float(most)) + spoiled, is_zero ? 0.0f : float(most) / largest};
  }

  template <class Activations>
  void put_chunk(const int16_t* numbers, int64_t chunk, int64_t token, const Scaled* blocks,
                 Activations kind) const {
    store_chunk(numbers, data + (chunk * num_tokens + token) * Activations::kTokenBytes, kind);
    Vec sums[4], firsts[4];
    UNROLL for (int part = 0; part < 4; ++part) {
      sums[part] = sums_of_part(numbers + part * kFineInputs);
      firsts[part] = (Vec)((Ints)sums[part] & ((lane_numbers() & 1) - 1));  // of pairs, which are lanes
    }
    const Quad found = sum_lanes(sums[0], sums[1], sums[2], sums[3]);
    const Quad first = sum_lanes(firsts[0], firsts[1], firsts[2], firsts[3]);
    int32_t* const to = kept + chunk * kNumKept * num_tokens + token;
    for (int part = 0; part < 4; ++part) {
      to[(kFineStarts + part) * num_tokens] = -128 * int32_t(found[part]);
      const uint32_t low = uint32_t(-32 * int32_t(first[part])) & 0xffff;
      const uint32_t high = uint32_t(-32 * int32_t(found[part] - first[part])) << 16;
      to[(kPairStarts + part) * num_tokens] = int32_t(high | low);
    }
    for (int part = 0; part < 2; ++part) {
      const float sum = found[2 * part] + found[2 * part + 1], scale = blocks[part].scale;
      const float scaled_sum = Activations::kScalesBlocks ? sum * scale : sum;
      to[(kStarts + part) * num_tokens] = -128 * int32_t(sum);
      std::memcpy(to + (kSums + part) * num_tokens, &scaled_sum, sizeof sum);
      std::memcpy(to + (kBlockScales + part) * num_tokens, &scale, sizeof scale);
    }
  }
};

// ---- products -----------------------------------------------------------------------------------

// values[t * kGroupRows + r] = <row r of a group, token t of x>, short of the token's scale. As many bytes
// at `ahead` are pulled towards the core meanwhile. Inlined it is a tenth slower: GCC runs out of registers.
template <class Format, class Activations, int T>
__attribute__((noinline)) void group_product(const uint8_t* group, int64_t,
                                             const PackedInputs& inputs, int64_t first_token,
                                             int64_t ahead, float* values) {
  static_assert(!Activations::kScalesBlocks || Format::kPartInputs == kScaleInputs, "");
  using Sum = typename Activations::Sum;
  constexpr int64_t kTokenBytes = Activations::kTokenBytes;
  // Sums of 16 bits can begin nowhere but at zero, so where others begin is added in the end.
  constexpr bool kAddsStart = Activations::kScalesBlocks && !Format::kStartsAtZero;
  constexpr bool kPutsFirst = Format::kStartsAtZero || kAddsStart;
  constexpr int V = kGroupVecs, kVecBytes = kLanes * int(sizeof(float));
  const int64_t num_tokens = inputs.num_tokens, chunks = weight_chunks(inputs.K);
  const int8_t* x = inputs.data + first_token * kTokenBytes;
  const int32_t* kept = inputs.kept + first_token;
  Chunk<Format> chunk(group);
  Vec total[V][T];
  UNROLL for (int v = 0; v < V; ++v) UNROLL for (int t = 0; t < T; ++t) total[v][t] = Vec{};
  for (int64_t number = 0; number < chunks; ++number, chunk.next(), x += num_tokens * kTokenBytes) {
    const uint8_t* words = chunk.integers();
    const int8_t* quad_x = x;
    chunk.fetch(ahead);
    const int32_t* of_part = kept + PackedInputs::first_kept<Format>() * num_tokens;
    const int32_t* const block_scales = kept + PackedInputs::kBlockScales * num_tokens;
    kept += PackedInputs::kNumKept * num_tokens;
    _Pragma("GCC unroll 1") for (int part = 0; part < Format::kParts; ++part) {
      Sum sum[V][T];
      if constexpr (!kPutsFirst)
        UNROLL for (int t = 0; t < T; ++t)
          UNROLL for (int v = 0; v < V; ++v) sum[v][t] = Sum(Format::start(repeat(of_part + t)));
      _Pragma("GCC unroll 4") for (int i = 0; i < Format::kPartInputs / kQuad / Format::kQuads; ++i) {
        UNROLL for (int which = 0; which < Format::kQuads * Activations::kQuadParts; ++which) {
          Ints weights[V];
          UNROLL for (int v = 0; v < V; ++v)
            weights[v] = Activations::template weights<Format>(Format::load(words + v * kVecBytes, i), which);
          UNROLL for (int t = 0; t < T; ++t) {
            const typename Activations::Input input(quad_x + t * kTokenBytes);
            UNROLL for (int v = 0; v < V; ++v) {
              if (kPutsFirst && i + which == 0) sum[v][t].put(weights[v], input);
              else sum[v][t].add(weights[v], input);
            }
          }
          quad_x += sizeof(int32_t);
        }
      }
      words += Format::kPartBytes;
      UNROLL for (int v = 0; v < V; ++v) {
        const Vec scale = chunk.scale(part, v * kLanes);
        UNROLL for (int t = 0; t < T; ++t) {
          Ints found = sum[v][t].total();
          if constexpr (kAddsStart) found += Format::start(repeat(of_part + t));
          Vec factor = scale;
          if constexpr (Activations::kScalesBlocks)
            factor *= (Vec)repeat(block_scales + part * num_tokens + t);
          total[v][t] = fma(__builtin_convertvector(found, Vec), factor, total[v][t]);
        }
        if constexpr (Format::kHasMinima) {
          const Vec minimum = chunk.minimum(part, v * kLanes);
          UNROLL for (int t = 0; t < T; ++t)
            total[v][t] = fma(PackedInputs::sum<Format>(of_part + t), minimum, total[v][t]);
        }
      }
      of_part += num_tokens;
    }
  }
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) store(values + (t * V + v) * kLanes, total[v][t]);
}

// Hands out values[(t - base) * G * kGroupRows + r] of some tokens and up to G groups of rows.
template <int G, class Put>
inline void put_block(const float* values, int64_t base, Range tokens, const float* scales, int64_t row,
                      int64_t num_rows, const Put& put) {
  constexpr int64_t kRows = G * kGroupRows;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const float* const found = values + (t - base) * kRows;
    const float scale = scales[t];
    const auto put_row = [&](int64_t r) INLINE { put(t, row + r, found[r] * scale); };
    if (num_rows == kRows) {  // a loop that becomes a few vectors
      _Pragma("GCC ivdep") for (int64_t r = 0; r < kRows; ++r) put_row(r);
    } else {
      for (int64_t r = 0; r < num_rows; ++r) put_row(r);
    }
  }
}

}  // namespace foredraft
