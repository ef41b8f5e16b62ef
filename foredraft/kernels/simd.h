// Vectors of floats: the only file that knows an instruction set, but for the few that int8.h needs.
//
// Everything is written against `Vec`, a GCC/Clang vector of kLanes floats. Multiply-adds are
// always explicit (`fma`) and the build forbids the compiler to make its own, so an expression has
// the same value wherever it is inlined. That is what makes a result independent of the shape of
// the block that computed it.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace foredraft {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Weights and activations are read two vectors at a time; see `load_pair`.
constexpr int kPair = 2 * kLanes;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Quad __attribute__((vector_size(16)));

// Short loops over registers: unrolled before anything else, or their arrays stay in memory.
#define UNROLL _Pragma("GCC unroll 16")

#define INLINE __attribute__((always_inline))

// Prefetches go to the second cache: the first has too few buffers for misses, and its loads would
// wait behind them (a third of the bandwidth, measured on Zen 4).
constexpr int kToL2 = 2;

struct bf16 {
  uint16_t bits;
};

// Hides from the compiler how a pointer came about.
inline void keep_in_register(const uint8_t*& pointer) { asm("" : "+r"(pointer)); }

inline Vec load(const float* source) {
  Vec v;
  std::memcpy(&v, source, sizeof v);
  return v;
}

// Hides from the compiler how a vector came about, so it cannot fold or undo the instruction.
template <class V>
inline void keep_in_register(V& v) {
#if defined(__AVX__)
  asm("" : "+x"(v));
#else
  (void)v;
#endif
}

// A load kept apart from the instructions that use it: folded into several, it would be repeated.
inline Vec load_to_register(const float* source) {
  Vec v = load(source);
  keep_in_register(v);
  return v;
}

inline void store(float* target, Vec v) { std::memcpy(target, &v, sizeof v); }

inline Vec broadcast(float x) { return x - Vec{}; }

// a * b + c, rounded once where the machine can. Tests have it emulated, slowly, to have the bits of
// machines that can.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(FOREDRAFT_EMULATE_FMA)
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

// The same for running sums held in registers. GCC would else copy sums between registers and, with
// all 16 in use, spill some to memory, which halves the speed.
inline void accumulate(Vec& sum, Vec a, Vec b) {
#if defined(__FMA__) && !defined(__AVX512F__)
  Vec c = sum;
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  sum = c;
#else
  sum = fma(a, b, sum);
#endif
}

// 0, 1, 2, ...
template <int... kLane>
inline Ints lane_numbers(std::integer_sequence<int, kLane...>) { return Ints{kLane...}; }
inline Ints lane_numbers() { return lane_numbers(std::make_integer_sequence<int, kLanes>{}); }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

// ---- sums over lanes: one fixed tree for every vector -------------------------------------------

#if defined(__AVX__)
inline __m128 pair_sums(__m128 a, __m128 b) {
  return _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd));
}
#endif
#if defined(__AVX512F__)
inline __m256 folded(Vec v) {
  const __m512 x = (__m512)v;
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(x), high);
}
#elif defined(__AVX__)
inline __m256 folded(Vec v) { return (__m256)v; }
#endif

// The sums of four vectors' lanes.
inline Quad sum_lanes(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX__)
  const auto pairs = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  };
  const __m256 halves = pairs(pairs(folded(a), folded(b)), pairs(folded(c), folded(d)));
  return (Quad)_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const auto pairs = [](float32x4_t x, float32x4_t y) { return vpaddq_f32(x, y); };
  return (Quad)pairs(pairs((float32x4_t)a, (float32x4_t)b), pairs((float32x4_t)c, (float32x4_t)d));
#else
  const auto sum = [](Vec v) { return (v[0] + v[1]) + (v[2] + v[3]); };
  return Quad{sum(a), sum(b), sum(c), sum(d)};
#endif
}

inline float sum_lanes(Vec v) { return sum_lanes(v, Vec{}, Vec{}, Vec{})[0]; }

inline float max_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX__)
  const __m256 x = (__m256)v;
  const __m128 fours = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_max_ss(twos, _mm_shuffle_ps(twos, twos, 1)));
#else
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// ---- transposition ------------------------------------------------------------------------------

// Swaps the lanes of `a` whose number has this bit with the lanes of `b` whose number has not.
template <int kBit, int... kLane>
inline void exchange(Ints& a, Ints& b, std::integer_sequence<int, kLane...>) {
  const Ints x = a, y = b;
#if defined(__clang__)
  a = __builtin_shufflevector(x, y, (kLane & kBit ? kLanes + kLane - kBit : kLane)...);
  b = __builtin_shufflevector(x, y, (kLane & kBit ? kLanes + kLane : kLane + kBit)...);
#else
  a = __builtin_shuffle(x, y, Ints{(kLane & kBit ? kLanes + kLane - kBit : kLane)...});
  b = __builtin_shuffle(x, y, Ints{(kLane & kBit ? kLanes + kLane : kLane + kBit)...});
#endif
}

// Lane i of vector j becomes what lane j of vector i was.
template <int kBit = kLanes / 2>
inline void transpose(Ints (&vectors)[kLanes]) {
  UNROLL for (int i = 0; i < kLanes; ++i)
    if (!(i & kBit))
      exchange<kBit>(vectors[i], vectors[i | kBit], std::make_integer_sequence<int, kLanes>{});
  if constexpr (kBit > 1) transpose<kBit / 2>(vectors);
}

// Lane i of columns[j] becomes word j of row i, for rows of kLanes words that lie `stride` bytes
// apart.
inline void load_columns(const void* source, int64_t stride, Ints (&columns)[kLanes]) {
  const char* rows = static_cast<const char*>(source);
#if defined(__AVX__)
  // Quads of words go to their lanes as they are loaded, which ports that shuffle do not see.
  UNROLL for (int part = 0; part < kLanes / 4; ++part) {
    const auto quad = [&](int row) INLINE {
      return _mm_loadu_ps(reinterpret_cast<const float*>(rows + row * stride + part * 16));
    };
#if defined(__AVX512F__)
    __m512 word[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      word[i] = _mm512_castps128_ps512(quad(i));
      word[i] = _mm512_insertf32x4(word[i], quad(i + 4), 1);
      word[i] = _mm512_insertf32x4(word[i], quad(i + 8), 2);
      word[i] = _mm512_insertf32x4(word[i], quad(i + 12), 3);
    }
    const __m512 a = _mm512_unpacklo_ps(word[0], word[1]), b = _mm512_unpackhi_ps(word[0], word[1]);
    const __m512 c = _mm512_unpacklo_ps(word[2], word[3]), d = _mm512_unpackhi_ps(word[2], word[3]);
    columns[4 * part] = (Ints)_mm512_shuffle_ps(a, c, 0x44);
    columns[4 * part + 1] = (Ints)_mm512_shuffle_ps(a, c, 0xee);
    columns[4 * part + 2] = (Ints)_mm512_shuffle_ps(b, d, 0x44);
    columns[4 * part + 3] = (Ints)_mm512_shuffle_ps(b, d, 0xee);
#else
    __m256 word[4];
    UNROLL for (int i = 0; i < 4; ++i)
      word[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(quad(i)), quad(i + 4), 1);
    const __m256 a = _mm256_unpacklo_ps(word[0], word[1]), b = _mm256_unpackhi_ps(word[0], word[1]);
    const __m256 c = _mm256_unpacklo_ps(word[2], word[3]), d = _mm256_unpackhi_ps(word[2], word[3]);
    columns[4 * part] = (Ints)_mm256_shuffle_ps(a, c, 0x44);
    columns[4 * part + 1] = (Ints)_mm256_shuffle_ps(a, c, 0xee);
    columns[4 * part + 2] = (Ints)_mm256_shuffle_ps(b, d, 0x44);
    columns[4 * part + 3] = (Ints)_mm256_shuffle_ps(b, d, 0xee);
#endif
  }
#else
  UNROLL for (int i = 0; i < kLanes; ++i)
    std::memcpy(&columns[i], rows + i * stride, sizeof columns[i]);
  transpose(columns);
#endif
}

// ---- weights ------------------------------------------------------------------------------------

// kPair weights as two vectors. A bfloat16 is the upper half of a float, so of each 32-bit word the
// low half is shifted up and the high half stays where it is: the first vector holds the even
// elements, the second the odd ones. Activations are stored in that order (`lane_order`), which
// costs nothing per weight. Those of other types stay in place.
inline Vec load_first(const bf16* source) {
  Bits words;
  std::memcpy(&words, source, sizeof words);
  return (Vec)(words << 16);
}

// Reads memory again and shifts twice instead of masking: registers are what dot_block is short of.
inline Vec load_second(const bf16* source) {
  Bits words;
  asm("" : "+r"(source));
  std::memcpy(&words, source, sizeof words);
  words >>= 16;
  keep_in_register(words);
  return (Vec)(words << 16);
}

inline Vec load_first(const float* source) { return load(source); }

// Compilers turn a conversion of byte vectors into one of each byte.
inline Vec load_first(const int8_t* source) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  Vec floats;
  for (int i = 0; i < kLanes; ++i) floats[i] = float(source[i]);
  return floats;
#endif
}

inline Vec load_second(const float* source) { return load(source + kLanes); }

inline Vec load_second(const int8_t* source) { return load_first(source + kLanes); }

// Where element i of an activation row is stored for weights of this type.
template <class Weight>
inline int64_t lane_order(int64_t i);

template <>
inline int64_t lane_order<float>(int64_t i) {
  return i;
}

template <>
inline int64_t lane_order<int8_t>(int64_t i) {
  return i;
}

template <>
inline int64_t lane_order<bf16>(int64_t i) {
  const int64_t within = i % kPair;
  return i - within + within / 2 + (within % 2) * kLanes;
}

inline int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

inline int64_t padded(int64_t size) { return ceil_div(size, kPair) * kPair; }

// Two vectors of consecutive elements in lane order.
inline void store_in_lane_order(float* target, Vec a, Vec b, const float*) {
  store(target, a);
  store(target + kLanes, b);
}

inline void store_in_lane_order(float* target, Vec a, Vec b, const bf16*) {
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  store(target, (Vec)_mm512_permutex2var_ps((__m512)a, even, (__m512)b));
  store(target + kLanes, (Vec)_mm512_permutex2var_ps((__m512)a, odd, (__m512)b));
#elif defined(__AVX__)
  const __m256 low = _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20);
  const __m256 high = _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31);
  store(target, (Vec)_mm256_shuffle_ps(low, high, 0x88));
  store(target + kLanes, (Vec)_mm256_shuffle_ps(low, high, 0xdd));
#else
  for (int i = 0; i < kLanes / 2; ++i) {
    target[i] = a[2 * i], target[kLanes / 2 + i] = b[2 * i];
    target[kLanes + i] = a[2 * i + 1], target[kLanes + kLanes / 2 + i] = b[2 * i + 1];
  }
#endif
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  const uint32_t word = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline void from_float(float x, float& out) { out = x; }

// Round to nearest, ties to even; a NaN stays one.
inline void from_float(float x, bf16& out) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  out.bits = uint16_t(is_nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

// ---- exp ----------------------------------------------------------------------------------------

// e^x to about 1 ulp for x <= 88; 0 below -87; NaN of NaN. x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its
// Taylor series of degree 7, whose remainder is below half an ulp there.
inline Vec exp(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec bounded = x > -87.0f ? x : broadcast(-87.0f);
  const Vec shifted = fma(bounded, broadcast(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0.693359375f), bounded);  // ln 2 in two parts
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec e = broadcast(1.0f / 5040);
  for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    e = fma(e, r, broadcast(coefficient));
  const Ints power = ((Ints)shifted - (Ints)magic) << 23;
  const Vec scaled = (Vec)((Ints)e + power);
  return x > -87.0f ? scaled : x == x ? Vec{} : x;
}

// x * sigmoid(x)
inline Vec silu(Vec x) {
  const Vec floor = x > -80.0f ? x : broadcast(-80.0f);  // e^80 is finite; silu is 0 below
  return x / (1.0f + exp(-floor));
}

// x * (1 + tanh(root(2 / pi) (x + 0.044715 x^3))) / 2, which is x * sigmoid of twice the argument.
inline Vec gelu_tanh(Vec x) {
  const Vec twice = 1.5957691216f * (x + 0.044715f * (x * x * x));
  const Vec floor = twice > -80.0f ? twice : broadcast(-80.0f);
  return x / (1.0f + exp(-floor));
}

inline Vec relu2(Vec x) {
  const Vec above = x > 0.0f ? x : Vec{};
  return above * above;
}

// arXiv 2411.13010; `of` are its numbers in interface.h.
inline Vec xielu(Vec x, const float* of) {
  const Vec least = broadcast(of[3]), low = x < least ? x : least;
  const Vec floor = low > -80.0f ? low : broadcast(-80.0f);
  const Vec above = of[0] * (x * x), below = ((exp(floor) - 1.0f) - x) * of[1];
  return (x > 0.0f ? above : below) + of[2] * x;
}

// gpt-oss': gates of at most 7 through x * sigmoid(1.702 x), times 1 + what they gate, -7 to 7.
inline Vec clipped_silu(Vec gate, Vec up) {
  const Vec most = broadcast(7.0f);
  gate = gate < most ? gate : most;
  up = up < most ? up : most;
  up = up > -most ? up : -most;
  const Vec steep = 1.702f * gate, floor = steep > -80.0f ? steep : broadcast(-80.0f);
  return (up + 1.0f) * (gate / (1.0f + exp(-floor)));
}

// c tanh(x / c), c > 0
inline Vec capped(Vec x, float c) {
  const Vec y = x * (1.0f / c), magnitude = y < 0.0f ? -y : y;
  const Vec small = exp(magnitude * -2.0f);
  const Vec tanh = (1.0f - small) / (1.0f + small);
  return (y < 0.0f ? -tanh : tanh) * c;
}

}  // namespace foredraft
