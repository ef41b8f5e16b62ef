// Products of weights whose scales are whole numbers times steps (K-quants) with activations of 8 bits.
//
// Shape legend: T tokens, V vectors of a group's weight rows.
//
// Whole numbers are multiplied as long as they stay exact: a block of 32 inputs gives the sum of its
// products, each part's times the part's factor, below 2^24. A chunk of two blocks is then
//   of_chunk = block 0 * scale of its activations, rounded; block 1 * its scale + of_chunk, rounded;
//   total = of_chunk * step + total, rounded; where there are minima, total = sum of activations * minimum
//   + total, rounded, for each part.
// This order is the same whatever instructions multiply and whatever is computed beside an element.
//
// With AVX2 products of bytes are added up in 16 bits, of a block or half of one, and the instruction that
// widens them multiplies with the factor. Many tokens meet a chunk of weights while it is unpacked in the
// nearest cache, a few at a time as registers hold; their totals are memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "dots.h"
#include "formats.h"
#include "groups.h"
#include "int8.h"
#include "simd.h"

namespace foredraft {

#if defined(__AVX__)
#define EACH_WORD UNROLL
#else
#define EACH_WORD _Pragma("GCC unroll 1")  // products of bytes are many instructions there
#endif

constexpr int64_t kMostManyTokens = 64;  // that meet a chunk before the next is unpacked

// Where the quads of a block are: as they lie packed, or a byte a weight.
template <class Format>
struct AsPacked {
  static constexpr int64_t kBlockBytes = Format::kParts / 2 * Format::kPartBytes;

  static Ints quad(const uint8_t* block, int number) {
    return Format::quad(Format::load(block, number / Format::kQuads), number % Format::kQuads);
  }
};

struct AsBytes {
  static constexpr int64_t kBlockBytes = kGroupRows * kScaleInputs;

  static Ints quad(const uint8_t* block, int number) { return load_ints(block + number * kRowQuads); }
};

// What a chunk holds beside its integers.
template <class Format>
struct ChunkScales {
  static constexpr int V = kGroupVecs;
  static constexpr int kFine = Format::kParts / 2;  // parts of a block
#if SUMS_IN_SHORTS
  using Factor = Shorts;  // twice in each lane
#else
  using Factor = Vec;
#endif
  Vec step[V], minima[Format::kParts][V];
  Factor factors[Format::kParts][V];

  explicit ChunkScales(const Chunk<Format>& chunk) {
    UNROLL for (int v = 0; v < V; ++v) {
      const int lane = v * kLanes;
      step[v] = Format::step(chunk.steps, lane);
      UNROLL for (int block = 0; block < 2; ++block) {
        UNROLL for (int fine = 0; fine < kFine; ++fine) {
          const int part = block * kFine + fine;
          if constexpr (Format::kHasMinima) minima[part][v] = chunk.minimum(part, lane);
#if SUMS_IN_SHORTS
          factors[part][v] = load_bytes_twice(Format::factors(chunk.head, part, lane));
#else
          factors[part][v] = __builtin_convertvector(Format::factor(chunk.head, part, lane), Vec);
#endif
        }
      }
    }
  }
};

// values[t][v]: the exact sums of a block, times their factors. `kept` are the inputs' rows of its chunk.
template <class Format, class Source, int T>
INLINE inline void block_values(const uint8_t* integers, const ChunkScales<Format>& scales, int block,
                                const int8_t* x, const int32_t* kept, int64_t num_tokens,
                                Vec (&values)[T][kGroupVecs]) {
  constexpr int V = kGroupVecs;
  constexpr int kFine = Format::kParts / 2;
  constexpr int64_t kTokenBytes = Eight::kTokenBytes, kVecBytes = kLanes * int64_t(sizeof(float));
  const auto quad = [&](int v, int i) INLINE { return Source::quad(integers + v * kVecBytes, i); };
  const auto input = [&](int t, int i) INLINE { return Eight::Input(x + t * kTokenBytes + i * kQuad); };
#if SUMS_IN_SHORTS
  // As many quads as 16 bits hold: 16 products up to 15 * 127, or 8 up to 31 * 127, or of -32 to 31. Sums of
  // weights with a sign begin where that takes them: they wrap around on the way.
  constexpr int kQuads = Format::kBits == 4 && kFine == 1 ? 8 : 4, kSums = 8 / kQuads;
  Ints found[T][V];
  UNROLL for (int part = 0; part < kSums; ++part) {
    Eight::Sum sum[T][V];
    if constexpr (!Format::kStartsAtZero)
      UNROLL for (int t = 0; t < T; ++t) {
        const Shorts start =
            (Shorts)repeat(kept + (PackedInputs::kPairStarts + 2 * block + part) * num_tokens + t);
        UNROLL for (int v = 0; v < V; ++v) sum[t][v].sum = Format::kBits == 4 ? start >> 2 : start;
      }
    UNROLL for (int i = part * kQuads; i < (part + 1) * kQuads; ++i) {
      Ints weights[V];
      UNROLL for (int v = 0; v < V; ++v) weights[v] = quad(v, i);
      UNROLL for (int t = 0; t < T; ++t) {
        const Eight::Input of_token = input(t, i);
        UNROLL for (int v = 0; v < V; ++v) {
          if (Format::kStartsAtZero && i % kQuads == 0) sum[t][v].put(weights[v], of_token);
          else sum[t][v].add(weights[v], of_token);
        }
      }
    }
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int v = 0; v < V; ++v) {
        const Ints of_part = pairs(sum[t][v].sum, scales.factors[block * kFine + part * kFine / kSums][v]);
        found[t][v] = part ? found[t][v] + of_part : of_part;
      }
  }
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) values[t][v] = __builtin_convertvector(found[t][v], Vec);
#else
  constexpr int kWords = kScaleInputs / kQuad / 2 / kFine;
  UNROLL for (int fine = 0; fine < kFine; ++fine) {
    const int part = block * kFine + fine;
    Eight::Sum sum[T][V];
    UNROLL for (int t = 0; t < T; ++t) {
      Ints start{};
      if constexpr (!Format::kStartsAtZero)
        start = Format::start(repeat(kept + (PackedInputs::kFineStarts + part) * num_tokens + t));
      UNROLL for (int v = 0; v < V; ++v) sum[t][v].sum = start;
    }
    EACH_WORD for (int i = fine * kWords; i < (fine + 1) * kWords; ++i)
      UNROLL for (int which = 0; which < 2; ++which) {
        Ints weights[V];
        UNROLL for (int v = 0; v < V; ++v) weights[v] = quad(v, 2 * i + which);
        UNROLL for (int t = 0; t < T; ++t) {
          const Eight::Input of_token = input(t, 2 * i + which);
          UNROLL for (int v = 0; v < V; ++v) sum[t][v].add(weights[v], of_token);
        }
      }
    UNROLL for (int t = 0; t < T; ++t)
      UNROLL for (int v = 0; v < V; ++v) {
        const Vec found = __builtin_convertvector(sum[t][v].sum, Vec);
        values[t][v] = fine ? fma(found, scales.factors[part][v], values[t][v])
                            : found * scales.factors[part][v];
      }
  }
#endif
}

// totals[t * V + v] of T tokens take up a chunk.
template <class Format, class Source, int T>
INLINE inline void add_chunk(const uint8_t* integers, const ChunkScales<Format>& scales, const int8_t* x,
                             const int32_t* kept, int64_t num_tokens, float* totals) {
  constexpr int V = kGroupVecs, kFine = Format::kParts / 2;
  Vec of_chunk[T][V];
  const int32_t* const block_scales = kept + PackedInputs::kBlockScales * num_tokens;
  _Pragma("GCC unroll 1") for (int block = 0; block < 2; ++block) {
    Vec values[T][V];
    block_values<Format, Source>(integers + block * Source::kBlockBytes, scales, block,
                                 x + block * kScaleInputs, kept, num_tokens, values);
    UNROLL for (int t = 0; t < T; ++t) {
      const Vec scale = (Vec)repeat(block_scales + block * num_tokens + t);
      UNROLL for (int v = 0; v < V; ++v)
        of_chunk[t][v] = block ? fma(values[t][v], scale, of_chunk[t][v]) : values[t][v] * scale;
    }
  }
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) {
      float* const place = totals + (t * V + v) * kLanes;
      Vec total = fma(of_chunk[t][v], scales.step[v], load(place));
      if constexpr (Format::kHasMinima)
        UNROLL for (int part = 0; part < Format::kParts; ++part) {
          const int32_t* const of_part = kept + (PackedInputs::first_kept<Format>() + part) * num_tokens + t;
          Vec sum = PackedInputs::sum<Format>(of_part);
          if (kFine > 1) sum *= (Vec)repeat(block_scales + part / kFine * num_tokens + t);
          total = fma(sum, scales.minima[part][v], total);
        }
      store(place, total);
    }
}

// As `group_product` of int8.h.
template <class Format, int T>
__attribute__((noinline)) void nested_product(const uint8_t* group, int64_t, const PackedInputs& inputs,
                                              int64_t first_token, int64_t ahead, float* values) {
  const int64_t num_tokens = inputs.num_tokens;
  const int8_t* x = inputs.data + first_token * Eight::kTokenBytes;
  const int32_t* kept = inputs.kept + first_token;
  std::fill(values, values + T * kGroupRows, 0.0f);
  Chunk<Format> chunk(group);
  for (int64_t number = 0; number < weight_chunks(inputs.K); ++number, chunk.next()) {
    chunk.fetch(ahead);
    const ChunkScales<Format> scales(chunk);
    add_chunk<Format, AsPacked<Format>, T>(chunk.integers(), scales, x, kept, num_tokens, values);
    x += num_tokens * Eight::kTokenBytes, kept += PackedInputs::kNumKept * num_tokens;
  }
}

template <class Format, int T>
__attribute__((noinline)) void add_chunk_of_bytes(const uint8_t* bytes,
                                                  const ChunkScales<Format>& scales, const int8_t* x,
                                                  const int32_t* kept, int64_t num_tokens, float* totals) {
  add_chunk<Format, AsBytes, T>(bytes, scales, x, kept, num_tokens, totals);
}

// Of one group and up to kMostManyTokens tokens.
template <class Format, int... kRest>
void nested_products(const uint8_t* group, const PackedInputs& inputs, Range tokens, int64_t ahead,
                     float* values, std::integer_sequence<int, kRest...>) {
  constexpr int64_t kTile = sizeof...(kRest);
  using Add = void (*)(const uint8_t*, const ChunkScales<Format>&, const int8_t*, const int32_t*, int64_t,
                       float*);
  constexpr Add adds[] = {add_chunk_of_bytes<Format, kRest + 1>...};
  const int64_t num_tokens = inputs.num_tokens, count = tokens.end - tokens.begin;
  const int64_t tiles = (count + kTile - 1) / kTile;
  const int8_t* x = inputs.data + tokens.begin * Eight::kTokenBytes;
  const int32_t* kept = inputs.kept + tokens.begin;
  alignas(64) uint8_t bytes[kGroupRows * kChunkInputs];
  std::fill(values, values + count * kGroupRows, 0.0f);
  Chunk<Format> chunk(group);
  for (int64_t number = 0; number < weight_chunks(inputs.K); ++number, chunk.next()) {
    chunk.fetch(ahead);
    const ChunkScales<Format> scales(chunk);
    UNROLL for (int block = 0; block < 2; ++block)
      Format::unpack(chunk.integers() + block * AsPacked<Format>::kBlockBytes,
                     bytes + block * AsBytes::kBlockBytes);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = count * tile / tiles, end = count * (tile + 1) / tiles;
      adds[end - first - 1](bytes, scales, x + first * Eight::kTokenBytes, kept + first, num_tokens,
                            values + first * kGroupRows);
    }
    x += num_tokens * Eight::kTokenBytes, kept += PackedInputs::kNumKept * num_tokens;
  }
}

template <class Format>
void many_products(const uint8_t* group, const PackedInputs& inputs, Range tokens, int64_t ahead,
                   float* values) {
  nested_products<Format>(group, inputs, tokens, ahead, values,
                          std::make_integer_sequence<int, kPackedBlockTokens>{});
}

}  // namespace foredraft
