// Integer dot products: sums of unsigned weights of up to 8 bits times activations of 16 or 8 bits, in one
// implementation for each instruction set. Integer sums are exact, so all of them give the same numbers.
//
// Four inputs that follow each other are a quad. A vector of weights holds one quad of kLanes rows;
// it meets the same quad of a token's activations, repeated in every lane. So sums lie one row a
// lane, and nothing is ever added across lanes.
//
// Activations of 16 bits are what an instruction set multiplies fastest:
//   - int16, in the order (0, 2, 1, 3) of a quad: masking and shifting a vector of weights gives the
//     pairs (0, 2) and (1, 3) of each row as int16, and an instruction multiplies and adds pairs.
//     Weights of one pair meet all tokens before those of the next, so few registers hold weights;
//   - two signed digits of 8 bits (kDigits), where an instruction adds four products of bytes: the
//     high digits of 64 inputs, then their low digits. A product then takes as many instructions, but
//     weights need no unpacking. Activations stay below 2^15 - 128, so the high digit has 8 bits too.
// Those of 8 bits, for weights of 4, are one byte each, and take half as many instructions. AVX2 adds
// products of bytes up in 16 bits, which hold those of 32 inputs: 8 * 2 * 15 * 127 is less than 2^15.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "groups.h"
#include "simd.h"

namespace foredraft {

#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD) || defined(FOREDRAFT_DIGITS) || \
    defined(FOREDRAFT_EMULATE_TILES)
#define DIGITS 1
#else
#define DIGITS 0
#endif
constexpr bool kDigits = DIGITS;

constexpr int64_t kQuad = 4;

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UShorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));  // of a Vec's lanes

// ---- weights and sums ---------------------------------------------------------------------------

inline Ints load_ints(const void* source) {
  Ints words;
  std::memcpy(&words, source, sizeof words);
  return words;
}

// The same 32 bits in every lane.
inline Ints repeat(const void* source) {
  int32_t word;
  std::memcpy(&word, source, sizeof word);
  return word - Ints{};
}

// a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] in each lane i.
inline Ints pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Ints)__builtin_ia32_pmaddwd128(a, b);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const int32x4_t first = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return (Ints)vpaddq_s32(first, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

// sum += the products of unsigned weights and signed bytes, four in each lane.
inline void add_quads(Ints& sum, Ints weights, Ints bytes) {
#if defined(__AVX512VNNI__)
  sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)bytes);
#elif defined(__AVXVNNI__)
  Ints c = sum;  // see `add_pairs`
  asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(c) : "x"(weights), "x"(bytes));
  sum = c;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  sum = (Ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)bytes);
#elif defined(__ARM_FEATURE_DOTPROD)
  // Signed times signed: weights lie 128 lower, and the bytes times 128 are added back.
  const int8x16_t lower = veorq_s8((int8x16_t)weights, vdupq_n_s8(-128));
  sum = (Ints)vdotq_s32((int32x4_t)sum, lower, (int8x16_t)bytes);
  sum = (Ints)vdotq_s32((int32x4_t)sum, vdupq_n_s8(64), (int8x16_t)bytes);
  sum = (Ints)vdotq_s32((int32x4_t)sum, vdupq_n_s8(64), (int8x16_t)bytes);
#else
  const Shorts x = (Shorts)bytes;
  sum += pairs((Shorts)(weights & 0x00ff00ff), (x << 8) >> 8) +
         pairs((Shorts)((UShorts)weights >> 8), x >> 8);
#endif
}

// sum += pairs(a, b). With 16 registers GCC would spill sums; see `accumulate` of simd.h.
inline void add_pairs(Ints& sum, Shorts a, Shorts b) {
#if defined(__AVXVNNI__)
  Ints c = sum;
  asm volatile("%{vex%} vpdpwssd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  sum = c;
#elif defined(__AVX2__) && !defined(__AVX512BW__)
  Ints c = sum, products;
  asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
               : "+x"(c), "=&x"(products) : "x"(a), "x"(b));
  sum = c;
#else
  sum += pairs(a, b);
#endif
}

// Activations of 16 bits.
struct Sixteen {
  static constexpr int32_t kLargest = 127 * 256 + 127;
  static constexpr int64_t kTokenBytes = 2 * kChunkInputs;  // of a token's activations in a chunk
  static constexpr int kQuadParts = kDigits ? 1 : 2;  // vectors of weights that a quad is multiplied as
  static constexpr bool kScalesBlocks = false;  // each with a scale of its own

  // Of words of weights what one instruction multiplies.
  template <class Format, class Words>
  static Ints weights(const Words& words, int which) { return Format::part(words, which); }

#if DIGITS
  // A quad of a token's activations, in every lane.
  struct Input {
    Ints high, low;

    explicit Input(const int8_t* x) : high(repeat(x)), low(repeat(x + kChunkInputs)) {}
  };

  struct Sum {
    Ints high, low;

    Sum() = default;
    explicit Sum(Ints start) : high{}, low(start) {}
    Ints total() const { return (high << 8) + low; }
    void add(Ints weights, const Input& x) {
      add_quads(high, weights, x.high);
      add_quads(low, weights, x.low);
    }
    // The first of a sum.
    void put(Ints weights, const Input& x) {
      high = low = Ints{};
      add(weights, x);
    }
  };
#else
  // A pair of a token's activations, in every lane.
  struct Input {
    Ints pair;

    explicit Input(const int8_t* x) : pair(repeat(x)) {}
  };

  struct Sum {
    Ints sum;

    Sum() = default;
    explicit Sum(Ints start) : sum(start) {}
    Ints total() const { return sum; }
    void add(Ints weights, const Input& x) { add_pairs(sum, (Shorts)weights, (Shorts)x.pair); }
    // The first of a sum: saves adding it to zero.
    void put(Ints weights, const Input& x) { sum = pairs((Shorts)weights, (Shorts)x.pair); }
  };
#endif
};

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !DIGITS
#define SUMS_IN_SHORTS 1
#else
#define SUMS_IN_SHORTS 0
#endif

// Activations of 8 bits, each 32 with a scale of their own, for weights of 4.
struct Eight {
  static constexpr int32_t kLargest = 127;
  static constexpr int64_t kTokenBytes = kChunkInputs;
  static constexpr int kQuadParts = 1;
  static constexpr bool kScalesBlocks = true;

  template <class Format, class Words>
  static Ints weights(const Words& words, int which) { return Format::quad(words, which); }

  struct Input {
    Ints quad;

    explicit Input(const int8_t* x) : quad(repeat(x)) {}
  };

#if SUMS_IN_SHORTS
  // Products of weights below 16 and signed bytes, two added up in each half of a lane.
  static Shorts halves(Ints weights, Ints bytes) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)bytes);
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)bytes);
#endif
  }
  static void add_halves(Shorts& sum, Ints weights, Ints bytes) {
#if defined(__AVX512BW__)
    sum = (Shorts)_mm512_add_epi16((__m512i)sum, (__m512i)halves(weights, bytes));  // may wrap around
#else
    Shorts c = sum, products;  // see `add_pairs`
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                 : "+x"(c), "=&x"(products) : "x"(weights), "x"(bytes));
    sum = c;
#endif
  }
  static Ints widened(Shorts sum) { return pairs(sum, Shorts{} + 1); }

  struct Sum {
    Shorts sum;

    Ints total() const { return widened(sum); }
    void add(Ints weights, const Input& x) { add_halves(sum, weights, x.quad); }
    void put(Ints weights, const Input& x) { sum = halves(weights, x.quad); }
  };
#else
  struct Sum {
    Ints sum;

    Ints total() const { return sum; }
    void add(Ints weights, const Input& x) { add_quads(sum, weights, x.quad); }
    void put(Ints weights, const Input& x) {
      sum = Ints{};
      add(weights, x);
    }
  };
#endif
};

// kLanes numbers of 16 bits: sign, 5 bits of exponent, 10 of fraction. Exact.
inline Vec load_halves(const void* source) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(source)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(source)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Vec)vcvt_f32_f16(vld1_f16(static_cast<const __fp16*>(source)));
#else
  Halves halves;
  std::memcpy(&halves, source, sizeof halves);
  const Bits words = __builtin_convertvector(halves, Bits);
  // Exponent and fraction as those of a float, times 2^112 for the difference of their biases. Both
  // are powers of two and the product is no subnormal, so nothing is rounded.
  const Vec magnitude = (Vec)((words & 0x7fff) << 13) * broadcast(0x1p112f);
  return (Vec)((Bits)magnitude | ((words & 0x8000) << 16));
#endif
}

// kLanes whole numbers of 8 bits with a sign.
inline Ints load_bytes(const void* source) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(source)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadu_si64(source));  // GCC would take single bytes
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, source, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

// Of each byte, below 16, that of a table in its place.
inline Ints looked_up(const uint8_t (&table)[16], Ints places) {
#if defined(__AVX512BW__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(codes), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), (__m256i)places);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Ints)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
#else
  uint8_t bytes[sizeof places];
  std::memcpy(bytes, &places, sizeof places);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_ints(bytes);
#endif
}

#if SUMS_IN_SHORTS
// The same as 16 bits, twice in each lane.
inline Shorts load_bytes_twice(const void* source) {
  const Ints order = (lane_numbers() * 0x01000100) | 0x00800080;
#if defined(__AVX512BW__)
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(source)));
  return (Shorts)_mm512_shuffle_epi8(bytes, (__m512i)order) >> 8;
#else
  const __m256i bytes = _mm256_broadcastq_epi64(_mm_loadu_si64(source));
  return (Shorts)_mm256_shuffle_epi8(bytes, (__m256i)order) >> 8;
#endif
}
#endif

// ---- activations --------------------------------------------------------------------------------

// Whole numbers nearest to x, ties to even, for |x| < 2^22.
inline Ints rounded(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23; see `exp` of simd.h
  return (Ints)(x + magic) - (Ints)magic;
}

// The lower halves of two vectors' lanes.
template <int... kIndex>
inline Shorts even_halves(Ints a, Ints b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector((Shorts)a, (Shorts)b, (2 * kIndex)...);
#else
  return __builtin_shuffle((Shorts)a, (Shorts)b, Shorts{(2 * kIndex)...});
#endif
}

// kPair whole numbers as int16 in their natural order. They come in the lane order of a type.
inline void store_shorts(int16_t* target, Ints first, Ints second, const bf16*) {
  const Ints words = (second << 16) | (first & 0xffff);
  std::memcpy(target, &words, sizeof words);
}

inline void store_shorts(int16_t* target, Ints first, Ints second, const float*) {
  const Shorts numbers = even_halves(first, second, std::make_integer_sequence<int, kPair>{});
  std::memcpy(target, &numbers, sizeof numbers);  // at once: what reads them is as wide
}

// Sixteen numbers, added up lane by lane. Sums stay below 2^24, so floats hold them.
inline Vec sums_of_part(const int16_t* numbers) {
  constexpr int64_t kBytes = kFineInputs * sizeof(int16_t);
  Ints sums{};
  UNROLL for (int64_t i = 0; i < kFineInputs; i += kPair) {
    Ints pairs{};
    std::memcpy(&pairs, numbers + i, kBytes < int64_t(sizeof pairs) ? kBytes : sizeof pairs);
    sums += ((pairs << 16) >> 16) + (pairs >> 16);
  }
  return __builtin_convertvector(sums, Vec);
}

// Which number of a quad comes where: 0, 2, 1, 3.
constexpr int swapped(int i) { return i % kQuad == 1 ? i + 1 : i % kQuad == 2 ? i - 1 : i; }

// Each quad in the order of its pairs.
template <int... kIndex>
inline Shorts in_pairs(Shorts numbers, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(numbers, numbers, swapped(kIndex)...);
#else
  return __builtin_shuffle(numbers, Shorts{int16_t(swapped(kIndex))...});
#endif
}

// A chunk of whole numbers as the instructions take it.
inline void store_chunk(const int16_t* numbers, int8_t* target, Eight) {
  typedef int8_t Bytes __attribute__((vector_size(kPair)));
  UNROLL for (int i = 0; i < kChunkInputs; i += kPair) {
    const Bytes bytes = __builtin_convertvector((Shorts)load_ints(numbers + i), Bytes);
    std::memcpy(target + i, &bytes, sizeof bytes);
  }
}

inline void store_chunk(const int16_t* numbers, int8_t* target, Sixteen) {
  if constexpr (kDigits) {
    typedef int8_t Digits __attribute__((vector_size(kPair)));
    UNROLL for (int i = 0; i < kChunkInputs; i += kPair) {
      const Shorts number = (Shorts)load_ints(numbers + i), high = (number + 128) >> 8;
      const Digits first = __builtin_convertvector(high, Digits);
      const Digits second = __builtin_convertvector(number - (high << 8), Digits);
      std::memcpy(target + i, &first, sizeof first);
      std::memcpy(target + kChunkInputs + i, &second, sizeof second);
    }
  } else {
    UNROLL for (int i = 0; i < kChunkInputs; i += kPair) {
      const Shorts number = (Shorts)load_ints(numbers + i);
      const Shorts pairs = in_pairs(number, std::make_integer_sequence<int, kPair>{});
      std::memcpy(target + 2 * i, &pairs, sizeof pairs);
    }
  }
}

}  // namespace foredraft
