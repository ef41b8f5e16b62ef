// How weights are packed (by packed.py): in groups of 16 rows, a group as a sequence of chunks of 64
// inputs, filled up with zeros. So a group is one stream of memory, in whole cache lines, and what is
// multiplied with one vector or tile of activations lies together.
#pragma once

#include <cstdint>

namespace foredraft {

constexpr int64_t kGroupRows = 16;
constexpr int64_t kScaleInputs = 32;                // that share a scale: a block
constexpr int64_t kFineInputs = 16;                 // of the formats whose blocks are finer
constexpr int64_t kChunkInputs = 2 * kScaleInputs;  // that are stored together

inline int64_t weight_chunks(int64_t K) { return (K + kChunkInputs - 1) / kChunkInputs; }

// A matrix [rows, K] in groups of rows. `Format` says what a chunk is.
template <class Format>
struct GroupedMatrix {
  const uint8_t* data;
  int64_t K;

  int64_t group_bytes() const { return weight_chunks(K) * Format::kChunkBytes; }
  const uint8_t* group(int64_t row) const { return data + row / kGroupRows * group_bytes(); }
  const void* at(int64_t row) const { return group(row); }
};

}  // namespace foredraft
