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
constexpr int64_t kRowQuads = kGroupRows * kQuad;                // bytes of a quad of each row

// Half-precision scales [2 parts, 16 rows], and behind them as many minima.
template <bool kMinima>
struct HalfScales {
  static constexpr int kParts = 2;
  static constexpr bool kNests = false;
  static constexpr bool kHasMinima = kMinima;
  static constexpr int64_t kRunChunks = 1, kStepBytes = 0;
  static constexpr int64_t kHeadBytes = (1 + kMinima) * kParts * kHalvesBytes;

  // Those of rows [lane, lane + kLanes).
  static Vec scale(const uint8_t*, const uint8_t* head, int part, int lane) {
    return load_halves(head + part * kHalvesBytes + lane * sizeof(uint16_t));
  }
  static Vec minimum(const uint8_t* steps, const uint8_t* head, int part, int lane) {
    return scale(steps, head, kParts + part, lane);
  }
};

// Scales of scales. Before a run of four chunks lie half-precision steps [16 rows], and as many for minima,
// or single-precision steps; in each chunk whole numbers of 8 bits [parts, 16 rows] that they are multiplied
// with, and as many for minima. The products are exact.
template <int kNumParts, bool kMinima, bool kSingle = false>
struct NestedScales {
  static constexpr int kParts = kNumParts;
  static constexpr bool kNests = true;
  static constexpr bool kHasMinima = kMinima;
  static constexpr int64_t kRunChunks = 4, kStepBytes = 64;  // whole cache lines
  static constexpr int64_t kHeadBytes = (1 + kMinima) * kParts * kGroupRows;
  static_assert(kHeadBytes % 64 == 0 && !(kMinima && kSingle), "");

  static Vec scale(const uint8_t* steps, const uint8_t* head, int part, int lane) {
    return step(steps, lane) * __builtin_convertvector(factor(head, part, lane), Vec);
  }
  static Vec minimum(const uint8_t* steps, const uint8_t* head, int part, int lane) {
    return scale(steps + kHalvesBytes, head, kParts + part, lane);
  }
  // The two that make a scale: of the run, and of a part.
  static Vec step(const uint8_t* steps, int lane) {
    if (kSingle) return load(reinterpret_cast<const float*>(steps) + lane);
    return load_halves(steps + lane * sizeof(uint16_t));
  }
  static const uint8_t* factors(const uint8_t* head, int part, int lane) {
    return head + part * kGroupRows + lane;
  }
  static Ints factor(const uint8_t* head, int part, int lane) { return load_bytes(factors(head, part, lane)); }
};

// ---- integers -----------------------------------------------------------------------------------

// Of a part: its bytes, and how many words of kQuads quads they are. `load` gives word `i` of the part that
// begins there, or of a vector of its rows. kMost is the largest that is multiplied.

// A byte each, as [16 quads of inputs, 16 rows, 4 inputs]. Those with a sign are stored 128 higher; the
// sum of a part's activations times 128 is taken off where its sum begins.
template <bool kSigned>
struct ByteWeights {
  static constexpr int kQuads = 1, kBits = 8, kMost = 255;  // of a word, of a weight
  static constexpr bool kUnpacks = false, kStartsAtZero = !kSigned;

  static Ints load(const uint8_t* part, int i) { return load_ints(part + i * kRowQuads); }
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
    return words[input / kQuad * kRowQuads + row * kQuad + input % kQuad] - 128 * kSigned;
  }
};

// Four bits each, as [8 pairs of quads, 16 rows, 4 inputs]: the first quad in the lower half of each
// byte, the second in the upper one. Those with a sign are stored 8 higher.
template <bool kSigned>
struct HalfByteWeights {
  static constexpr int kQuads = 2, kBits = 4, kMost = 15;
  static constexpr bool kUnpacks = true, kStartsAtZero = !kSigned;

  static Ints load(const uint8_t* part, int i) { return load_ints(part + i * kRowQuads); }
  static Ints start(Ints sum) { return sum >> 4; }  // a multiple of 128
  static Ints quad(Ints words, int which) { return (words >> (4 * which)) & 0x0f0f0f0f; }
  static Ints part(Ints words, int which) {
    if (kDigits) return quad(words, which);
    const Ints shifted = (Ints)((UShorts)words >> (8 * (which % 2) + 4 * (which / 2)));
    return which == 3 ? shifted : shifted & 0x000f000f;
  }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad;
    const uint8_t both = words[quad / 2 * kRowQuads + row * kQuad + input % kQuad];
    return (both >> (4 * (quad % 2)) & 15) - 8 * kSigned;
  }
};

// Of a vector of bytes what one instruction multiplies with activations of 16 bits.
template <class Weights, class Words>
inline Ints part_of_bytes(const Words& words, int which) {
  if (kDigits) return Weights::quad(words, which);
  const Ints bytes = Weights::quad(words, which / 2);
  return which % 2 ? (Ints)((UShorts)bytes >> 8) : bytes & 0x00ff00ff;
}

// Four bits each, as half bytes: the place of a weight among 16, which are stored 128 higher.
template <const uint8_t (&kTable)[16]>
struct CodeWeights {
  static constexpr int kQuads = 2, kBits = 4, kMost = 255;
  static constexpr bool kUnpacks = true, kStartsAtZero = false;
  using Places = HalfByteWeights<false>;

  static Ints load(const uint8_t* part, int i) { return Places::load(part, i); }
  static Ints start(Ints sum) { return sum; }
  static Ints quad(Ints words, int which) { return looked_up(kTable, Places::quad(words, which)); }
  static Ints part(Ints words, int which) { return part_of_bytes<CodeWeights>(words, which); }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    return kTable[Places::integer(words, row, input)] - 128;
  }
};

// Those of IQ4, floats of 4 bits, IQ2, IQ3_S and IQ3_XXS (gguf_blocks.py), the last ones halved.
inline constexpr uint8_t kCodesIq4[] = {1,   24,  45,  63,  79,  93,  106, 118,
                                        129, 141, 153, 166, 181, 197, 217, 241};
inline constexpr uint8_t kCodesFp4[] = {128, 129, 130, 131, 132, 134, 136, 140,
                                        128, 127, 126, 125, 124, 122, 120, 116};
inline constexpr uint8_t kCodesIq2[] = {85,  103, 120, 136, 153, 171, 128, 128,
                                        128, 128, 128, 128, 128, 128, 128, 128};
inline constexpr uint8_t kCodesIq3S[] = {113, 115, 117, 119, 121, 123, 125, 127,
                                         129, 131, 133, 135, 137, 139, 141, 143};
inline constexpr uint8_t kCodesIq3[] = {97,  102, 106, 110, 114, 118, 122, 126,
                                        130, 134, 138, 142, 146, 150, 154, 159};

// Two bits each, four quads in a word, those of the first lowest in each byte.
struct TwoBitWeights {
  static constexpr int kQuads = 4, kBits = 2, kMost = 3;
  static constexpr bool kUnpacks = true, kStartsAtZero = true;

  static Ints load(const uint8_t* part, int i) { return load_ints(part + i * kRowQuads); }
  static Ints start(Ints sum) { return sum; }
  static Ints quad(Ints words, int which) { return (words >> (2 * which)) & 0x03030303; }
  static Ints part(Ints words, int which) { return part_of_bytes<TwoBitWeights>(words, which); }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad;
    return words[quad / kQuads * kRowQuads + row * kQuad + input % kQuad] >> (2 * (quad % kQuads)) & 3;
  }
};

// Five bits each. The lower four of a part lie as half bytes, and behind them the fifth of all eight
// quads, those of the first lowest in each byte. Those with a sign are stored 16 higher.
template <bool kSigned>
struct FiveBitWeights {
  static constexpr int kQuads = 2, kBits = 5, kMost = 31;
  static constexpr bool kUnpacks = true, kStartsAtZero = !kSigned;

  struct Words {
    Ints lower, upper;
    int first;  // of the quads of `upper`
  };

  static Words load(const uint8_t* part, int i) {
    return {load_ints(part + i * kRowQuads), load_ints(part + 4 * kRowQuads), kQuads * i};
  }
  static Ints start(Ints sum) { return sum >> 3; }
  static Ints quad(const Words& words, int which) {
    const int left = 4 - (words.first + which);
    const Ints upper = left >= 0 ? words.upper << left : words.upper >> -left;
    return ((words.lower >> (4 * which)) & 0x0f0f0f0f) | (upper & 0x10101010);
  }
  static Ints part(const Words& words, int which) { return part_of_bytes<FiveBitWeights>(words, which); }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad % 8;
    const uint8_t* const begin = words + input / kScaleInputs * 5 * kRowQuads + row * kQuad + input % kQuad;
    const int lower = begin[quad / 2 * kRowQuads] >> (4 * (quad % 2)) & 15;
    return lower + 16 * (begin[4 * kRowQuads] >> quad & 1) - 16 * kSigned;
  }
};

// Six bits each, four quads in the bytes of three: each of the first three quads in the lower bits of its
// own, the fourth in the upper two bits of all, its lowest bits first. They have a sign, and are stored 32
// higher.
struct SixBitWeights {
  static constexpr int kQuads = 4, kBits = 6, kMost = 63;
  static constexpr bool kUnpacks = true, kStartsAtZero = false;

  struct Words {
    Ints of[3];
  };

  static Words load(const uint8_t* part, int i) {
    part += i * 3 * kRowQuads;
    return {{load_ints(part), load_ints(part + kRowQuads), load_ints(part + 2 * kRowQuads)}};
  }
  static Ints start(Ints sum) { return sum >> 2; }
  static Ints quad(const Words& words, int which) {
    if (which < 3) return words.of[which] & 0x3f3f3f3f;
    return ((words.of[0] >> 6) & 0x03030303) | ((words.of[1] >> 4) & 0x0c0c0c0c) |
           ((words.of[2] >> 2) & 0x30303030);
  }
  static Ints part(const Words& words, int which) { return part_of_bytes<SixBitWeights>(words, which); }
  static int32_t integer(const uint8_t* words, int64_t row, int64_t input) {
    const int64_t quad = input / kQuad % kQuads;
    const uint8_t* const begin =
        words + input / (kQuad * kQuads) * 3 * kRowQuads + row * kQuad + input % kQuad;
    if (quad < 3) return (begin[quad * kRowQuads] & 63) - 32;
    return (begin[0] >> 6 | begin[kRowQuads] >> 6 << 2 | begin[2 * kRowQuads] >> 6 << 4) - 32;
  }
};

// ---- formats ------------------------------------------------------------------------------------

// What lies in a chunk: scales, then integers. Behind what is common to it, a run of chunks.
template <class Weights, class Scales>
struct Format : Weights, Scales {
  static constexpr int64_t kPartInputs = kChunkInputs / Scales::kParts;
  static constexpr int64_t kPartBytes = kGroupRows * kPartInputs * Weights::kBits / 8;
  static constexpr int64_t kChunkBytes = Scales::kHeadBytes + Scales::kParts * kPartBytes;
  static constexpr int64_t kRunBytes = Scales::kStepBytes + Scales::kRunChunks * kChunkBytes;

  static int64_t group_bytes(int64_t K) { return ceil_div(weight_chunks(K), Scales::kRunChunks) * kRunBytes; }

  // The weights of 32 inputs as [8 quads, 16 rows, 4 inputs], a byte each.
  static void unpack(const uint8_t* block, uint8_t* unpacked) {
    constexpr int kWords = kScaleInputs / kQuad / Weights::kQuads;
    UNROLL for (int word = 0; word < kWords; ++word)
      UNROLL for (int64_t i = 0; i < kRowQuads; i += int64_t(sizeof(Ints))) {
        const auto words = Weights::load(block + i, word);
        UNROLL for (int which = 0; which < Weights::kQuads; ++which) {
          const Ints one = Weights::quad(words, which);
          std::memcpy(unpacked + (Weights::kQuads * word + which) * kRowQuads + i, &one, sizeof one);
        }
      }
  }
};

using Int8 = Format<ByteWeights<true>, HalfScales<false>>;
using Int4 = Format<HalfByteWeights<false>, HalfScales<true>>;
using Int5 = Format<FiveBitWeights<false>, HalfScales<true>>;
using Nested4 = Format<HalfByteWeights<false>, NestedScales<2, true>>;
using Nested5 = Format<FiveBitWeights<false>, NestedScales<2, true>>;
using Nested6 = Format<SixBitWeights, NestedScales<4, false>>;
using Centred4 = Format<HalfByteWeights<true>, HalfScales<false>>;
using Centred5 = Format<FiveBitWeights<true>, HalfScales<false>>;
using Nested2 = Format<TwoBitWeights, NestedScales<4, true>>;
using Nested3 = Format<HalfByteWeights<true>, NestedScales<4, false>>;  // of 3 bits, in 4
template <const uint8_t (&kTable)[16]>
using Codes = Format<CodeWeights<kTable>, HalfScales<false>>;
template <const uint8_t (&kTable)[16]>
using NestedCodes = Format<CodeWeights<kTable>, NestedScales<4, false, true>>;

// A chunk of a group, and those behind it.
template <class Format>
struct Chunk {
  const uint8_t *steps, *head;  // `steps`, if there are any, of its run

  explicit Chunk(const uint8_t* group, int64_t number = 0)
      : steps(group + number / Format::kRunChunks * Format::kRunBytes),
        head(steps + Format::kStepBytes + number % Format::kRunChunks * Format::kChunkBytes) {}

  const uint8_t* integers() const { return head + Format::kHeadBytes; }
  Vec scale(int part, int lane) const { return Format::scale(steps, head, part, lane); }
  Vec minimum(int part, int lane) const { return Format::minimum(steps, head, part, lane); }

  void next() {
    head += Format::kChunkBytes;
    if (head != steps + Format::kRunBytes) return;
    steps = head;
    head += Format::kStepBytes;
  }

  // As many bytes as this chunk has are pulled towards the core.
  INLINE void fetch(int64_t ahead) const {
    const uint8_t* from = head + ahead;
    keep_in_register(from);  // or each line gets a register of its own
    UNROLL for (int64_t i = 0; i < Format::kChunkBytes; i += 64) __builtin_prefetch(from + i, 0, kToL2);
    if (Format::kStepBytes > 0 && head == steps + Format::kStepBytes)
      __builtin_prefetch(steps + ahead, 0, kToL2);
  }
};

// The weights of one row of a group as numbers, each product and each sum rounded once.
template <class Format>
void unpack_row(const uint8_t* group, int64_t row, int64_t K, float* numbers) {
  const int64_t lanes = row / kLanes * kLanes;
  for (int64_t k = 0; k < K; ++k) {
    const Chunk<Format> chunk(group, k / kChunkInputs);
    const int64_t input = k % kChunkInputs;
    const int part = int(input / Format::kPartInputs);
    const int32_t integer = Format::integer(chunk.integers(), row, input);
    numbers[k] = float(integer) * chunk.scale(part, int(lanes))[row - lanes];
    if constexpr (Format::kHasMinima) numbers[k] += chunk.minimum(part, int(lanes))[row - lanes];
  }
}

}  // namespace foredraft
