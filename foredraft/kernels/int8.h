// Products of weights in 8 and 4 bits with 16-bit activations.
//
// Shape legend: T tokens (activation rows), K inputs of a product.
//
// A weight is an integer times the scale of its row's block of 32 inputs, for 4 bits plus the block's
// minimum; an activation is an integer of 16 bits times the scale of its token. A block's products are
// summed in int32, which is exact: 32 of them stay below 2^29. Blocks are then added up in order as
// float32, one or two multiply-adds each. So an output element has the same bits whatever is computed
// beside it, as matmul.h promises for other weights, and whatever instructions multiply (dots.h).
//
// Weights are packed in groups of rows (groups.h), chunks in one of the formats below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dots.h"
#include "groups.h"
#include "matmul.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kScalesBytes = 2 * kGroupRows * sizeof(uint16_t);  // of a chunk

// Half-precision scales [2 blocks, 16 rows], weights + 128 [16 quads of inputs, 16 rows, 4 inputs].
// The sum of a block's activations times 128 is taken off where its sum begins.
struct Bits8 {
  static constexpr int64_t kHeadBytes = kScalesBytes;
  static constexpr int64_t kChunkBytes = kHeadBytes + kGroupRows * kChunkInputs;
  static constexpr int kQuads = 1;  // of a word
  static constexpr bool kHasMinima = false, kUnpacks = false, kStartsAtZero = false;

  // Of a vector of words what one instruction multiplies.
  static Ints part(Ints words, int which) {
    if (kDigits) return words;
    return which == 1 ? (Ints)((UShorts)words >> 8) : words & 0x00ff00ff;
  }
  // What is kept of the sum of a token's block.
  static int32_t kept(int32_t sum) { return -128 * sum; }
  static Ints start(const int32_t* kept) { return repeat(kept); }
};

// Half-precision scales [2 blocks, 16 rows], as many minima, weights [8 pairs of quads, 16 rows, 4
// inputs]: the first quad in the lower four bits of each byte, the second in the upper ones.
struct Bits4 {
  static constexpr int64_t kHeadBytes = 2 * kScalesBytes;
  static constexpr int64_t kChunkBytes = kHeadBytes + kGroupRows * kChunkInputs / 2;
  static constexpr int kQuads = 2;
  static constexpr bool kHasMinima = true, kUnpacks = true, kStartsAtZero = true;

  static Ints quad(Ints words, int which) { return (words >> (4 * which)) & 0x0f0f0f0f; }
  // Of a vector of words what one instruction multiplies.
  static Ints part(Ints words, int which) {
    if (kDigits) return quad(words, which);
    const Ints shifted = (Ints)((UShorts)words >> (8 * (which % 2) + 4 * (which / 2)));
    return which == 3 ? shifted : shifted & 0x000f000f;
  }
  static int32_t kept(int32_t sum) {
    const float exact = float(sum);
    int32_t bits;
    std::memcpy(&bits, &exact, sizeof bits);
    return bits;
  }
  static Ints start(const int32_t*) { return Ints{}; }
  // A block's weights as [8 quads, 16 rows, 4 inputs], a byte each.
  static void unpack(const uint8_t* words, uint8_t* unpacked) {
    constexpr int64_t kVec = sizeof(Ints), kRow = kQuad * kGroupRows, kPairs = kScaleInputs / kQuad / 2;
    UNROLL for (int64_t pair = 0; pair < kPairs; ++pair)
      UNROLL for (int64_t i = 0; i < kRow; i += kVec) {
        const Ints both = load_ints(words + pair * kRow + i);
        const Ints first = quad(both, 0), second = quad(both, 1);
        std::memcpy(unpacked + 2 * pair * kRow + i, &first, kVec);
        std::memcpy(unpacked + (2 * pair + 1) * kRow + i, &second, kVec);
      }
  }
};

// Blocks that fit the registers: groups of rows, tokens, and for each of both a sum.
constexpr int kGroupVecs = kGroupRows / kLanes;
constexpr int kPackedBlockTokens = kLanes == 16 ? 8 : 4;
constexpr int64_t kMostGroups = kLanes == 16 ? 4 : 1;
constexpr int block_groups(int num_tokens) {
  return kLanes != 16 ? 1 : num_tokens <= 2 ? 4 : num_tokens <= 4 ? 2 : 1;
}

// ---- activations --------------------------------------------------------------------------------

// Activations of all tokens, chunk by chunk, and what belongs to them. Rows are padded with zeros to
// whole chunks. `Format` is that of the weights.
template <class Format>
struct PackedInputs {
  int64_t num_tokens, K;
  float* scales;    // [T]
  int32_t* kept;    // [blocks, T]: of the sums of blocks; see Format
  int8_t* data;     // [chunks, T, kTokenBytes]

  PackedInputs(float* memory, int64_t num_tokens, int64_t K)
      : num_tokens(num_tokens),
        K(K),
        scales(memory + weight_chunks(K) * num_tokens * kTokenBytes / int64_t(sizeof(float))),
        kept(reinterpret_cast<int32_t*>(scales + num_tokens)),
        data(reinterpret_cast<int8_t*>(memory)) {}

  // Floats of memory.
  static int64_t size(int64_t num_tokens, int64_t K) {
    return num_tokens * (1 + weight_chunks(K) * (2 + kTokenBytes / int64_t(sizeof(float))));
  }

  // Takes over a row of K floats that lie in the lane order of `Weight`, zeros behind. A NaN or
  // infinity among them makes the scale NaN, and with it all that is computed from the row.
  template <class Weight>
  void quantise(const float* row, int64_t token) const {
    const Vec factor = broadcast(put_scale(row, token));
    const int64_t whole = padded(K);
    for (int64_t chunk = 0; chunk < weight_chunks(K); ++chunk) {
      int16_t numbers[kChunkInputs] = {};
      const int64_t first = chunk * kChunkInputs, end = std::min(whole - first, kChunkInputs);
      for (int64_t k = 0; k < end; k += kPair)
        store_shorts(numbers + k, rounded(load(row + first + k) * factor),
                     rounded(load(row + first + k + kLanes) * factor),
                     static_cast<const Weight*>(nullptr));
      put_chunk(numbers, chunk, token);
    }
  }

 private:
  // Stores a row's scale; what its elements are to be multiplied with.
  float put_scale(const float* row, int64_t token) const {
    // Two running values of each, for an instruction waits for the one before in its chain.
    Vec most[2] = {}, broken[2] = {};
    for (int64_t k = 0; k < padded(K); k += kPair)
      UNROLL for (int i = 0; i < 2; ++i) {
        const Vec x = load(row + k + i * kLanes);
        most[i] = max(max(x, -x), most[i]);
        broken[i] = fma(x, Vec{}, broken[i]);
      }
    const float largest = max_lanes(max(most[0], most[1]));
    const bool is_zero = largest < 1e-30f;  // 1 / largest would overflow
    scales[token] = (is_zero ? 0.0f : largest / kLargestActivation) + sum_lanes(broken[0] + broken[1]);
    return is_zero ? 0.0f : kLargestActivation / largest;
  }

  void put_chunk(const int16_t* numbers, int64_t chunk, int64_t token) const {
    store_chunk(numbers, data + (chunk * num_tokens + token) * kTokenBytes);
    const Quad sums = sum_lanes(sums_of_block(numbers), sums_of_block(numbers + kScaleInputs), Vec{}, Vec{});
    for (int block = 0; block < 2; ++block)
      kept[(2 * chunk + block) * num_tokens + token] = Format::kept(int32_t(sums[block]));
  }
};

// ---- products -----------------------------------------------------------------------------------

// values[(t * G + g) * kGroupRows + r] = <row r of group g, token t of x>, short of the token's scale.
// As many bytes at `ahead` are pulled towards the core meanwhile. Inlined it is a tenth slower: GCC
// runs out of registers.
template <class Format, int G, int T>
__attribute__((noinline)) void group_product(const uint8_t* group, int64_t group_bytes,
                                             const PackedInputs<Format>& inputs, int64_t first_token,
                                             int64_t ahead, float* values) {
  constexpr int V = G * kGroupVecs, kVecBytes = kLanes * int(sizeof(float)), kLine = 64;
  const auto at = [=](int v) INLINE {
    return v / kGroupVecs * group_bytes + v % kGroupVecs * kVecBytes;
  };
  const int64_t num_tokens = inputs.num_tokens, chunks = weight_chunks(inputs.K);
  const int8_t* x = inputs.data + first_token * kTokenBytes;
  const int32_t* kept = inputs.kept + first_token;
  Vec total[V][T];
  UNROLL for (int v = 0; v < V; ++v) UNROLL for (int t = 0; t < T; ++t) total[v][t] = Vec{};
  for (int64_t chunk = 0; chunk < chunks; ++chunk, x += num_tokens * kTokenBytes) {
    const uint8_t* scales = group;
    const uint8_t* words = group + Format::kHeadBytes;
    const int8_t* quad_x = x;
    group += Format::kChunkBytes;
    UNROLL for (int g = 0; g < G; ++g)
      UNROLL for (int64_t i = 0; i < Format::kHeadBytes; i += kLine)
        __builtin_prefetch(scales + g * group_bytes + ahead + i, 0, kToL2);
    _Pragma("GCC unroll 1") for (int block = 0; block < 2; ++block) {
      Sum sum[V][T];
      if constexpr (!Format::kStartsAtZero)
        UNROLL for (int t = 0; t < T; ++t)
          UNROLL for (int v = 0; v < V; ++v) sum[v][t] = Sum(Format::start(kept + t));
      _Pragma("GCC unroll 4") for (int i = 0; i < kScaleInputs / kQuad / Format::kQuads; ++i) {
        UNROLL for (int g = 0; g < G; ++g)
          __builtin_prefetch(words + g * group_bytes + ahead, 0, kToL2);
        UNROLL for (int which = 0; which < Format::kQuads * kQuadParts; ++which) {
          Ints weights[V];
          UNROLL for (int v = 0; v < V; ++v)
            weights[v] = Format::part(load_ints(words + at(v)), which);
          UNROLL for (int t = 0; t < T; ++t) {
            const Input input(quad_x + t * kTokenBytes);
            UNROLL for (int v = 0; v < V; ++v) {
              if (Format::kStartsAtZero && i + which == 0) put_products(sum[v][t], weights[v], input);
              else add_products(sum[v][t], weights[v], input);
            }
          }
          quad_x += sizeof(int32_t);
        }
        words += kQuad * kGroupRows;
      }
      UNROLL for (int v = 0; v < V; ++v) {
        const uint8_t* const scale_at =
            scales + v / kGroupVecs * group_bytes + v % kGroupVecs * kVecBytes / 2;
        const Vec scale = load_halves(scale_at);
        UNROLL for (int t = 0; t < T; ++t)
          total[v][t] = fma(__builtin_convertvector(sum[v][t].total(), Vec), scale, total[v][t]);
        if constexpr (Format::kHasMinima) {
          const Vec minimum = load_halves(scale_at + kScalesBytes);
          UNROLL for (int t = 0; t < T; ++t)
            total[v][t] = fma((Vec)repeat(kept + t), minimum, total[v][t]);
        }
      }
      scales += kScalesBytes / 2;
      kept += num_tokens;
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

// So many groups of weight rows from `row` against tokens [first, stop).
template <int G, class Format, class Put>
inline void some_groups(const PackedMatrix<Format>& weights, int64_t row, int64_t num_rows,
                        const PackedInputs<Format>& x, int64_t first, int64_t stop, int64_t ahead,
                        const Put& put) {
  float values[G * kGroupRows * kPackedBlockTokens];
  const auto product = [&](auto tokens) {
    constexpr int T = decltype(tokens)::value;
    if constexpr (T <= kPackedBlockTokens && block_groups(T) >= G)
      group_product<Format, G, T>(weights.group(row), weights.group_bytes(), x, first, ahead, values);
  };
  switch (stop - first) {
    case 1: product(std::integral_constant<int, 1>{}); break;
    case 2: product(std::integral_constant<int, 2>{}); break;
    case 3: product(std::integral_constant<int, 3>{}); break;
    case 4: product(std::integral_constant<int, 4>{}); break;
    case 5: product(std::integral_constant<int, 5>{}); break;
    case 6: product(std::integral_constant<int, 6>{}); break;
    case 7: product(std::integral_constant<int, 7>{}); break;
    default: product(std::integral_constant<int, 8>{}); break;
  }
  put_block<G>(values, first, {first, stop}, x.scales, row, num_rows, put);
}

// Weight rows `rows`, which begin with a group, against all tokens. As many bytes at `ahead` are
// prefetched meanwhile.
template <class Format, class Put>
inline void all_tokens_in_vectors(const PackedMatrix<Format>& weights, Range rows,
                                  const PackedInputs<Format>& x, int64_t num_tokens,
                                  const void* ahead, const Put& put) {
  const int64_t rounds = (num_tokens + kPackedBlockTokens - 1) / kPackedBlockTokens;
  const int64_t bytes_ahead = static_cast<const uint8_t*>(ahead) - weights.group(rows.begin);
  const auto product = [&](auto groups, int64_t row) {
    constexpr int G = decltype(groups)::value;
    const int64_t count = std::min(G * kGroupRows, rows.end - row);
    for (int64_t round = 0; round < rounds; ++round)
      some_groups<G>(weights, row, count, x, num_tokens * round / rounds,
                     num_tokens * (round + 1) / rounds, bytes_ahead, put);
  };
  const int64_t most = block_groups(int((num_tokens + rounds - 1) / rounds)) * kGroupRows;
  int64_t row = rows.begin;
  const auto in_blocks = [&](auto groups) {
    constexpr int64_t kRows = decltype(groups)::value * kGroupRows;
    if (most < kRows) return;
    for (; rows.end - row > kRows - kGroupRows; row += kRows) product(groups, row);
  };
  if constexpr (kMostGroups > 1) {
    in_blocks(std::integral_constant<int, 4>{});
    in_blocks(std::integral_constant<int, 2>{});
  }
  in_blocks(std::integral_constant<int, 1>{});
}

}  // namespace foredraft
