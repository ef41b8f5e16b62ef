// Products of int8 weights with int16 activations.
//
// Shape legend: T tokens (activation rows), K inputs of a product.
//
// A weight is an int8 times the scale of its row's block of 32 inputs; an activation is an int16
// times the scale of its token. A block's products are summed in int32, which is exact: 32 of them
// stay below 2^27. Blocks are then added up in order as float32, one multiply-add each. So an output
// element has the same bits whatever is computed beside it, as matmul.h promises for other weights.
//
// Weights are packed (by int8.py) in groups of 16 rows, a group as a sequence of blocks, a block as
//   bfloat16 scales [16 rows], int8 weights [16 pairs of inputs, 16 rows, 2 inputs].
// One vector of weights thus holds the same pair of inputs of several rows. It meets a pair of
// activations repeated in every lane, one instruction multiplies and adds the pairs, and sums lie
// one row a lane: nothing is ever added across lanes, and a group is one stream of memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "matmul.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kGroupRows = 16;
constexpr int64_t kScaleInputs = 32;  // that share a scale
constexpr int64_t kBlockBytes = kGroupRows * (sizeof(bf16) + kScaleInputs);
constexpr int kInt8BlockTokens = 6;  // sums of so many tokens fit the 16 registers of AVX2

typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));  // of a Vec's lanes

// ---- instructions -------------------------------------------------------------------------------

inline Shorts load_weights(const int8_t* source) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)source));
#else
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, Shorts);
#endif
}

inline Vec load_scales(const int8_t* source) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source)), 16);
#else
  Halves halves;
  std::memcpy(&halves, source, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
#endif
}

// The same two activations in every lane.
inline Shorts repeat_pair(const int16_t* source) {
  int32_t pair;
  std::memcpy(&pair, source, sizeof pair);
  return (Shorts)(pair - Ints{});
}

// sum += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] in each lane i. GCC would spill sums; see
// `accumulate` of simd.h.
inline void add_pairs(Ints& sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  sum += (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  Ints c = sum, products;
  asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
               : "+x"(c), "=&x"(products) : "x"(a), "x"(b));
  sum = c;
#else
  const Ints x = (Ints)a, y = (Ints)b;
  sum += ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Whole numbers nearest to x, ties to even, for |x| < 2^22.
inline Ints rounded(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23; see `exp` of simd.h
  return (Ints)(x + magic) - (Ints)magic;
}

// kPair whole numbers as int16 in their natural order. They come in the lane order of a type.
inline void store_shorts(int16_t* target, Ints first, Ints second, const bf16*) {
  const Ints words = (second << 16) | (first & 0xffff);
  std::memcpy(target, &words, sizeof words);
}

inline void store_shorts(int16_t* target, Ints first, Ints second, const float*) {
  const Halves low = __builtin_convertvector(first, Halves);
  const Halves high = __builtin_convertvector(second, Halves);
  std::memcpy(target, &low, sizeof low);
  std::memcpy(target + kLanes, &high, sizeof high);
}

// ---- activations --------------------------------------------------------------------------------

inline int64_t num_scales(int64_t K) { return (K + kScaleInputs - 1) / kScaleInputs; }

// int16 activations and their scales, one a token. Rows are padded with zeros to whole blocks.
struct Int8Inputs {
  int16_t* data;
  float* scales;
  int64_t stride;

  Int8Inputs(float* memory, int64_t num_tokens, int64_t K)
      : data(reinterpret_cast<int16_t*>(memory + num_tokens)),
        scales(memory),
        stride(num_scales(K) * kScaleInputs) {}

  // Floats of memory.
  static int64_t size(int64_t num_tokens, int64_t K) {
    return num_tokens * (1 + num_scales(K) * kScaleInputs / 2);
  }

  // Takes over a row of K floats that lie in the lane order of `Weight`, zeros behind. A NaN or infinity among them
  // makes the scale NaN, and with it all that is computed from the row.
  template <class Weight>
  void quantise(const float* row, int64_t K, int64_t token) const {
    const int64_t whole = padded(K);
    Vec most{}, broken{};
    for (int64_t k = 0; k < whole; k += kLanes) {
      const Vec x = load(row + k);
      most = max(max(x, -x), most);
      broken = fma(x, Vec{}, broken);
    }
    const float largest = max_lanes(most);
    const bool is_zero = largest < 1e-30f;  // 1 / largest would overflow
    scales[token] = (is_zero ? 0.0f : largest / 32767.0f) + sum_lanes(broken);
    const Vec factor = broadcast(is_zero ? 0.0f : 32767.0f / largest);
    int16_t* const target = data + token * stride;
    for (int64_t k = 0; k < whole; k += kPair)
      store_shorts(target + k, rounded(load(row + k) * factor),
                   rounded(load(row + k + kLanes) * factor), static_cast<const Weight*>(nullptr));
    std::fill(target + whole, target + stride, int16_t(0));
  }
};

// ---- products -----------------------------------------------------------------------------------

// A matrix [rows, K] in groups of rows.
struct Int8Matrix {
  const int8_t* data;
  int64_t K;

  int64_t group_bytes() const { return num_scales(K) * kBlockBytes; }
  const int8_t* group(int64_t row) const { return data + row / kGroupRows * group_bytes(); }
  // The matrix that begins behind `rows` rows; each matrix begins with a new group.
  Int8Matrix behind(int64_t rows) const { return {group(rows + kGroupRows - 1), K}; }
};

// values[t * kGroupRows + r] = <row r of the group, token t of x>, short of the token's scale. As
// many bytes at `ahead` are pulled towards the core meanwhile. Inlined it is a tenth slower: GCC runs
// out of registers.
template <int T>
__attribute__((noinline)) void group_product(const int8_t* group, int64_t num_blocks, const int16_t* x,
                          int64_t x_stride, const int8_t* ahead, float* values) {
  constexpr int V = kGroupRows / kLanes;
  constexpr int kPairBytes = 2 * kGroupRows, kLine = 64;
  Vec total[V][T];
  UNROLL for (int v = 0; v < V; ++v) UNROLL for (int t = 0; t < T; ++t) total[v][t] = Vec{};
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int8_t* const scales = group;
    const int8_t* weights = group + kGroupRows * sizeof(bf16);
    group += kBlockBytes;
    Ints sum[V][T];
    UNROLL for (int v = 0; v < V; ++v) UNROLL for (int t = 0; t < T; ++t) sum[v][t] = Ints{};
    _Pragma("GCC unroll 1") for (; weights < group; weights += 2 * kPairBytes, x += 4) {
      __builtin_prefetch(ahead, 0, kToL2);
      ahead += kLine;
      UNROLL for (int pair = 0; pair < 2; ++pair) {
        Shorts weight[V];
        UNROLL for (int v = 0; v < V; ++v)
          weight[v] = load_weights(weights + pair * kPairBytes + v * 2 * kLanes);
        UNROLL for (int t = 0; t < T; ++t) {
          const Shorts activation = repeat_pair(x + t * x_stride + 2 * pair);
          UNROLL for (int v = 0; v < V; ++v) add_pairs(sum[v][t], weight[v], activation);
        }
      }
    }
    UNROLL for (int v = 0; v < V; ++v) {
      const Vec scale = load_scales(scales + v * kLanes * sizeof(bf16));
      UNROLL for (int t = 0; t < T; ++t)
        total[v][t] = fma(__builtin_convertvector(sum[v][t], Vec), scale, total[v][t]);
    }
  }
  UNROLL for (int t = 0; t < T; ++t)
    UNROLL for (int v = 0; v < V; ++v) store(values + t * kGroupRows + v * kLanes, total[v][t]);
}

// Weight rows `rows`, which begin with a group, against all tokens. As many rows `ahead` are
// prefetched meanwhile.
template <class Put>
inline void all_tokens(const Int8Matrix& weights, Range rows, const Int8Inputs& x,
                       int64_t num_tokens, int64_t ahead, const Put& put) {
  const int64_t num_blocks = num_scales(weights.K);
  const int64_t most = num_tokens % 4 == 0 ? 4 : kInt8BlockTokens;
  const int64_t rounds = (num_tokens + most - 1) / most;
  float values[kInt8BlockTokens * kGroupRows];
  for (int64_t row = rows.begin; row < rows.end; row += kGroupRows) {
    const int64_t count = std::min(kGroupRows, rows.end - row);
    for (int64_t round = 0; round < rounds; ++round) {
      const int64_t first = num_tokens * round / rounds;
      const int64_t stop = num_tokens * (round + 1) / rounds;
      const auto product = [&](auto tokens) {
        group_product<decltype(tokens)::value>(weights.group(row), num_blocks,
                                               x.data + first * x.stride, x.stride,
                                               weights.group(row + ahead), values);
      };
      switch (stop - first) {
        case 1: product(std::integral_constant<int, 1>{}); break;
        case 2: product(std::integral_constant<int, 2>{}); break;
        case 3: product(std::integral_constant<int, 3>{}); break;
        case 4: product(std::integral_constant<int, 4>{}); break;
        case 5: product(std::integral_constant<int, 5>{}); break;
        default: product(std::integral_constant<int, 6>{}); break;
      }
      for (int64_t t = first; t < stop; ++t) {
        const float* const found = values + (t - first) * kGroupRows;
        const float scale = x.scales[t];
        const auto put_row = [&](int64_t r) INLINE { put(t, row + r, found[r] * scale); };
        if (count == kGroupRows) {  // a loop that becomes a few vectors
          _Pragma("GCC ivdep") for (int64_t r = 0; r < kGroupRows; ++r) put_row(r);
        } else {
          for (int64_t r = 0; r < count; ++r) put_row(r);
        }
      }
    }
  }
}

// All of `rows`, which begin with a group: put(token, row, value) for each output.
template <class Put>
inline void matmul(const Int8Matrix& weights, Range rows, const Int8Inputs& x, int64_t num_tokens,
                   const Put& put) {
  for (int64_t row = rows.begin; row < rows.end; row += kGroupRows) {
    const int64_t end = std::min(row + kGroupRows, rows.end);
    all_tokens(weights, {row, end}, x, num_tokens, end < rows.end ? kGroupRows : 0, put);
  }
}

}  // namespace foredraft
