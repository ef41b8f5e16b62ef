// Attention of one tile of tokens, for tests.
//
// Shape legend: see attention.h.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("ira-algorithm=priority")  // as decoder.cpp
#endif

#include "attention.h"

#include <cstdint>
#include <vector>

#include "attention_floats.h"
#include "attention_tiles.h"

using namespace foredraft;

extern "C" {

struct ForedraftAttention {
  int64_t num_tokens, group, head_dim, block_entries;
  int64_t window;               // 0: all is seen
  int64_t int8_entries;
  double cap;                   // of scores; 0: none
  const int32_t* table;         // blocks of the slot
  const int32_t* prefixes;      // [T]
  const int32_t* extra_starts;  // [T + 1] into extras
  const int32_t* extras;
  const void* keys;             // [blocks, B, D] bfloat16, or [blocks, B, 4 + D] int8
  const void* values;
  const float* queries;         // [M, D], scaled
  float* out;                   // [M, D]
};

}  // extern "C"

namespace {

template <class Number, class Arithmetic>
void attend(const ForedraftAttention& a) {
  const int64_t T = a.num_tokens, G = a.group, M = T * G, D = a.head_dim;
  std::vector<Visible> visible;
  int64_t ranks = 0;
  for (int64_t t = 0; t < T; ++t) {
    visible.push_back(Visible::of(a.prefixes[t], a.extras + a.extra_starts[t],
                                  a.extra_starts[t + 1] - a.extra_starts[t], a.window));
    ranks = std::max(ranks, visible.back().count());
  }
  std::vector<float> memory(size_t(AttentionScratch<Arithmetic>::size(M, D)));
  const AttentionScratch<Arithmetic> scratch(memory.data(), M, D);
  for (int64_t m = 0; m < M; ++m)
    std::copy(a.queries + m * D, a.queries + (m + 1) * D,
              scratch.arithmetic.queries + m * padded(D));
  const TileSession session(QueryBlocks(M).shape());
  scratch.arithmetic.begin();
  const auto entries = [&](const void* store) {
    const int shift = __builtin_ctzll(uint64_t(a.block_entries));
    const int64_t head_stride = a.block_entries * (D + kInFront<Number>);
    return CacheLayer<const Number>{static_cast<const Number*>(store), head_stride, 0, D, shift}
        .entries(a.table, 0);
  };
  AttentionTile<Number, Arithmetic> tile{
      entries(a.keys), entries(a.values), D, G, visible.data(), T, scratch.arithmetic, float(a.cap)};
  for (int64_t begin = 0; begin < ranks; begin += kChunk) {
    Ahead<Number> next;
    next.add(tile.keys, tile.values, {begin + kChunk, std::min(begin + 2 * kChunk, ranks)});
    tile.attend_chunk(begin, next, begin ? scratch.chunk : scratch.all);
    for (int64_t m = 0; begin && m < M; ++m) {
      if (!tile.reaches(m / G, begin)) continue;
      if (visible[size_t(m / G)].begins_in(begin)) begin_with(scratch.all, scratch.chunk, m, D);
      else fold(scratch.all, scratch.chunk, m, D);
    }
  }
  for (int64_t m = 0; m < M; ++m)
    for (int64_t d = 0; d < D; ++d)
      a.out[m * D + d] =
          scratch.all.values[m * attended_width(D) + lane_order<Number>(d)] / scratch.all.sum[m];
}

}  // namespace

extern "C" {

__attribute__((visibility("default")))
int64_t foredraft_has_tiles() { return tiles_allowed(); }

// Writes an int8 entry of D numbers, and the four bytes before them.
__attribute__((visibility("default")))
void foredraft_put_int8_entry(const float* numbers, int64_t head_dim, int8_t* entry) {
  put_entry(numbers, head_dim, entry);
}

// On tiles, which must be there, or in float32; over int8 in float32.
__attribute__((visibility("default")))
void foredraft_attend(const ForedraftAttention* attention, int64_t on_tiles) {
  if (attention->int8_entries) attend<int8_t, FloatAttention<int8_t>>(*attention);
  else if (on_tiles) attend<bf16, TileAttention>(*attention);
  else attend<bf16, FloatAttention<bf16>>(*attention);
}

}  // extern "C"
