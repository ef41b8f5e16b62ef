// How weights of few bits lie in a chunk of a group (groups.h): a format is its integers and its scales.
//
// A weight is an integer times the scale of its row's part of a chunk, plus the part's minimum where
// the format has one. Parts have 32 inputs, or 16. The formats are those that models come in, so that
// no weight is rounded: a chunk holds the very numbers. Rows of a chunk lie side by side, so a vector
// holds the same of kLanes rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "dots.h"
#include "groups.h"
#include "interface.h"
#include "simd.h"

namespace foredraft {

// ---- scales -------------------------------------------------------------------------------------

constexpr int64_t kHalvesBytes = kGroupRows * sizeof(uint16_t);  // a number of 16 bits for each row

// Half-precision scales [2 parts, 16 rows], and behind them as many minima.
template <bool kMinima>
struct HalfScales {
  static constexpr int kParts = 2;
  static constexpr bool kNests = false;
  static constexpr bool kHasMinima = kMinima;
  static constexpr int64_t kHeadBytes = (1 + kMinima) * kParts * kHalvesBytes;

  // Those of rows [lane, lane + kLanes).
  static Vec scale(const uint8_t* head, int part, int lane) {
    return load_halves(head + part * kHalvesBytes + lane * sizeof(uint16_t));
  }
  static Vec minimum(const uint8_t* head, int part, int lane) {
    return scale(head, kParts + part, lane);
  }
};

// Scales of scales: half-precision steps [16 rows], and as many for minima; whole numbers of 8 bits
// [parts, 16 rows] that they are multiplied with, and as many for minima. The products are exact.
template <int kNumParts, bool kMinima>
struct NestedScales {
  static constexpr int kParts = kNumParts;
  static constexpr bool kNests = true;
  static constexpr bool kHasMinima = kMinima;
  static constexpr int64_t kHeadBytes = 128;  // whole cache lines
  static_assert((1 + kMinima) * (kHalvesBytes + kParts * kGroupRows) <= kHeadBytes, "");

  static Vec scale(const uint8_t* head, int part, int lane) { return product(head, 0, part, lane); }
  static Vec minimum(const uint8_t* head, int part, int lane) {
    return product(head, 1, kParts + part, lane);
  }
  // The two that make a scale: of the chunk, and of its part.
  static Vec step(const uint8_t* head, int lane) { return load_halves(head + lane * sizeof(uint16_t)); }
  static Ints factor(const uint8_t* head, int part, int lane) {
    return load_bytes(head + (1 + kMinima) * kHalvesBytes + part * kGroupRows + lane);
  }

 private:
  static Vec product(const uint8_t* head, int step, int factor, int lane) {
    const uint8_t* const factors = head + (1 + kMinima) * kHalvesBytes;
    return load_halves(head + step * kHalvesBytes + lane * sizeof(uint16_t)) *
           __builtin_convertvector(load_bytes(factors + factor * kGroupRows + lane), Vec);
  }
};

// ---- integers -----------------------------------------------------------------------------------

// A byte each, as [16 quads of inputs, 16 rows, 4 inputs]. Those with a sign are stored 128 higher; the
// sum of a part's activations times 128 is taken off where its sum begins.
template <bool kSigned>
struct ByteWeights {
  static constexpr int kQuads = 1, kBits = 8;  // of a word, of a weight
  static constexpr int64_t kWeightsBytes = kGroupRows * kChunkInputs, kTailBytes = 0;
  static constexpr bool kUnpacks = false, kStartsAtZero = !kSigned;

  // Word `i` of a part. Behind the words of a part lie kTailBytes.
  static Ints load(const uint8_t* word, int) { return load_ints(word); }
  // Where a part's sum begins, given its activations' sum times -128.
  static Ints start(Ints sum) { return sum; }
  static Ints quad(Ints words, int) { return words; }
  // Of a vector of words what one instruction multiplies with activations of 16 bits.
  static Ints part(Ints words, int which) {
    if (kDigits) return words;
    return which == 1 ? (Ints)((UShorts)words >> 8) : words & 0x00ff00ff;
  }
  // The weight of one row and input.
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    return words[input / kQuad * kQuad * kGroupRows + row * kQuad + input % kQuad] - 128 * kSigned;
  }
};

// Four bits each, as [8 pairs of quads, 16 rows, 4 inputs]: the first quad in the lower half of each
// byte, the second in the upper one. Those with a sign are stored 8 higher.
template <bool kSigned>
struct HalfByteWeights {
  static constexpr int kQuads = 2, kBits = 4, kWordsOfTail = 4;
  static constexpr int64_t kWeightsBytes = kGroupRows * kChunkInputs / 2, kTailBytes = 0;
  static constexpr bool kUnpacks = true, kStartsAtZero = !kSigned;

  static Ints load(const uint8_t* word, int) { return load_ints(word); }
  static Ints start(Ints sum) { return sum >> 4; }  // a multiple of 128
  static Ints quad(Ints words, int which) { return (words >> (4 * which)) & 0x0f0f0f0f; }
  static Ints part(Ints words, int which) {
    if (kDigits) return quad(words, which);
    const Ints shifted = (Ints)((UShorts)words >> (8 * (which % 2) + 4 * (which / 2)));
    return which == 3 ? shifted : shifted & 0x000f000f;
  }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad;
    const uint8_t both = words[quad / 2 * kQuad * kGroupRows + row * kQuad + input % kQuad];
    return (both >> (4 * (quad % 2)) & 15) - 8 * kSigned;
  }
  // The weights of 32 inputs as [8 quads, 16 rows, 4 inputs], a byte each.
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

// Five bits each, or six. The lower four lie as half bytes; behind the words of 8 / kUpper quads one more
// has their upper bits, those of the first quad lowest in each byte. Those with a sign are stored higher
// by half of their range.
template <int kUpper, bool kSigned>
struct SplitWeights {
  static constexpr int kQuads = 2, kBits = 4 + kUpper;
  static constexpr int kQuadsOfTail = 8 / kUpper, kWordsOfTail = kQuadsOfTail / kQuads;
  static constexpr int64_t kTailBytes = kQuad * kGroupRows;
  static constexpr int64_t kWeightsBytes = kGroupRows * kChunkInputs * kBits / 8;
  static constexpr bool kUnpacks = true, kStartsAtZero = !kSigned;

  struct Words {
    Ints lower, upper;
    int first;  // of the quads of `upper`
  };

  static Words load(const uint8_t* word, int i) {
    return {load_ints(word), load_ints(word + (kWordsOfTail - i) * kTailBytes), kQuads * i};
  }
  static Ints start(Ints sum) { return sum >> (8 - kBits); }  // a multiple of 128
  static Ints quad(const Words& words, int which) {
    constexpr int32_t kMask = 0x01010101 * (((1 << kUpper) - 1) << 4);
    const int left = 4 - kUpper * (words.first + which);
    const Ints upper = left >= 0 ? words.upper << left : words.upper >> -left;
    return ((words.lower >> (4 * which)) & 0x0f0f0f0f) | (upper & kMask);
  }
  static Ints part(const Words& words, int which) {
    if (kDigits) return quad(words, which);
    const Ints both = quad(words, which / 2);
    return which % 2 ? (Ints)((UShorts)both >> 8) : both & 0x00ff00ff;
  }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad, of_tail = quad % kQuadsOfTail;
    const uint8_t* const begin =
        words + quad / kQuadsOfTail * (kWordsOfTail + 1) * kTailBytes + row * kQuad + input % kQuad;
    const int lower = begin[of_tail / kQuads * kTailBytes] >> (4 * (of_tail % kQuads)) & 15;
    const int upper = begin[kWordsOfTail * kTailBytes] >> (kUpper * of_tail) & ((1 << kUpper) - 1);
    return lower + 16 * upper - (8 << kUpper) * kSigned;
  }
  // As of HalfByteWeights.
  static void unpack(const uint8_t* words, uint8_t* unpacked) {
    constexpr int64_t kVec = sizeof(Ints), kRow = kQuad * kGroupRows;
    constexpr int kPairs = kScaleInputs / kQuad / kQuads;
    UNROLL for (int pair = 0; pair < kPairs; ++pair)
      UNROLL for (int64_t i = 0; i < kRow; i += kVec) {
        const Words both =
            load(words + (pair + pair / kWordsOfTail) * kRow + i, pair % kWordsOfTail);
        UNROLL for (int which = 0; which < kQuads; ++which) {
          const Ints one = quad(both, which);
          std::memcpy(unpacked + (kQuads * pair + which) * kRow + i, &one, kVec);
        }
      }
  }
};

// ---- formats ------------------------------------------------------------------------------------

// What lies in a chunk: scales, then integers.
template <class Weights, class Scales>
struct Format : Weights, Scales {
  static constexpr int64_t kPartInputs = kChunkInputs / Scales::kParts;
  static constexpr int64_t kChunkBytes = Scales::kHeadBytes + Weights::kWeightsBytes;
};

using Int8 = Format<ByteWeights<true>, HalfScales<false>>;
using Int4 = Format<HalfByteWeights<false>, HalfScales<true>>;
using Int5 = Format<SplitWeights<1, false>, HalfScales<true>>;
using Nested4 = Format<HalfByteWeights<false>, NestedScales<2, true>>;
using Nested5 = Format<SplitWeights<1, false>, NestedScales<2, true>>;
using Nested6 = Format<SplitWeights<2, true>, NestedScales<4, false>>;
using Centred4 = Format<HalfByteWeights<true>, HalfScales<false>>;
using Centred5 = Format<SplitWeights<1, true>, HalfScales<false>>;

// The weights of one row of a group as numbers, each product and each sum rounded once.
template <class Format>
void unpack_row(const uint8_t* group, int64_t row, int64_t K, float* numbers) {
  const int64_t lanes = row / kLanes * kLanes;
  for (int64_t k = 0; k < K; ++k) {
    const uint8_t* const chunk = group + k / kChunkInputs * Format::kChunkBytes;
    const int64_t input = k % kChunkInputs;
    const int part = int(input / Format::kPartInputs);
    const int32_t integer = Format::integer(chunk + Format::kHeadBytes, row, input);
    numbers[k] = float(integer) * Format::scale(chunk, part, int(lanes))[row - lanes];
    if (Format::kHasMinima) numbers[k] += Format::minimum(chunk, part, int(lanes))[row - lanes];
  }
}

}  // namespace foredraft
