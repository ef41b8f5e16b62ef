// Products of bfloat16 weights with activations in two bfloat16 parts, on tiles (amx.h).
//
// Shape legend: T tokens (activation rows), K inputs of a product.
//
// An activation is the sum of a bfloat16 and of another that holds what the first left over: 16 bits
// of it count. Of each 32 inputs first the high parts are multiplied and added, then the low ones. So
// an output element is one sum in one order whatever is computed beside it, as matmul.h promises for
// other products; single tokens go the same way.
//
// Weights are read where they lie, 16 rows of 32 inputs to a tile. Activations are laid out as
//   [blocks of 16 tokens, steps of 32 inputs, high and low, 16 pairs of inputs, 16 tokens, 2 inputs].
// What lies in columns without a token is multiplied too and never read.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "matmul.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kTileColumns = 16;  // tokens of a tile
constexpr int64_t kTileInputs = 32;
constexpr int64_t kRowBlock = 2 * kTileRows;
constexpr int64_t kTilePanelRows = 8 * kRowBlock;  // of many tokens; few pass one block at a time

inline int64_t tile_panel_rows(int64_t num_tokens) {
  return num_tokens > 2 * kTileColumns ? kTilePanelRows : kRowBlock;
}

// The nearest bfloat16 of each lane, as the upper half of a word, the lower half zero.
inline Bits to_bf16(Vec x) {
  const Bits word = (Bits)x;
  const Bits rounded = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000;
  return x == x ? rounded : (word | 0x400000) & 0xffff0000;
}

// Transposes [16, 16] words.
inline void transpose_tile(void* words) {
  if constexpr (kLanes == 16) {
    Ints columns[kLanes];
    load_columns(words, kTileRowBytes, columns);
    std::memcpy(words, columns, sizeof columns);
  } else {
    uint32_t (&tile)[16][16] = *static_cast<uint32_t(*)[16][16]>(words);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) std::swap(tile[i][j], tile[j][i]);
  }
}

struct TileInputs {
  float* data;
  int64_t num_tokens, K;

  static int64_t num_steps(int64_t K) { return (K + kTileInputs - 1) / kTileInputs; }

  // Floats of memory, room for alignment included.
  static int64_t size(int64_t num_tokens, int64_t K) {
    const int64_t blocks = (num_tokens + kTileColumns - 1) / kTileColumns;
    return blocks * num_steps(K) * 2 * kTileBytes / int64_t(sizeof(float)) + 16;
  }

  TileInputs(float* memory, int64_t num_tokens, int64_t K)
      : data(reinterpret_cast<float*>((uintptr_t(memory) + 63) / 64 * 64)),
        num_tokens(num_tokens),
        K(K) {}

  uint32_t* tile(int64_t block, int64_t step, int64_t part) const {
    return reinterpret_cast<uint32_t*>(data) + ((block * num_steps(K) + step) * 2 + part) * 256;
  }

  // Takes over rows of K floats that lie in the lane order of `Weight`, zeros behind; `tokens` begins
  // with a block.
  template <class Weight>
  void prepare(const float* rows, Range tokens) const {
    for (int64_t first = tokens.begin; first < tokens.end; first += kTileColumns) {
      const int64_t count = std::min(kTileColumns, tokens.end - first);
      for (int64_t step = 0; step < num_steps(K); ++step) {
        uint32_t* const high = tile(first / kTileColumns, step, 0);
        const bool in_rows = count > kFewColumns;
        for (int64_t t = 0; t < count; ++t)
          put_token<Weight>(rows + (first + t) * padded(K), step * kTileInputs,
                            high + (in_rows ? t * 16 : t), in_rows ? 1 : 16);
        if (in_rows) {
          transpose_tile(high);
          transpose_tile(high + 256);
        }
      }
    }
  }

 private:
  static constexpr int64_t kFewColumns = 3;  // are filled one by one faster

  // Both parts of a token's inputs [k, k + 32): words of a tile, `stride` apart, and of the next.
  template <class Weight>
  void put_token(const float* row, int64_t k, uint32_t* words, int64_t stride) const {
    for (int64_t pair = 0; pair < 16; pair += kLanes) {
      const int64_t first = k + 2 * pair;
      const bool there = first < padded(K);
      const Vec even = there ? evens(row + first, static_cast<const Weight*>(nullptr)) : Vec{};
      const Vec odd = there ? odds(row + first, static_cast<const Weight*>(nullptr)) : Vec{};
      const Bits high_even = to_bf16(even), high_odd = to_bf16(odd);
      const Bits high = high_odd | (high_even >> 16);
      const Bits low = to_bf16(odd - (Vec)high_odd) | (to_bf16(even - (Vec)high_even) >> 16);
      if (stride == 1) {
        std::memcpy(words + pair, &high, sizeof high);
        std::memcpy(words + pair + 256, &low, sizeof low);
        continue;
      }
      UNROLL for (int i = 0; i < kLanes; ++i) {
        words[(pair + i) * stride] = high[i];
        words[(pair + i) * stride + 256] = low[i];
      }
    }
  }

  // Of kPair floats in the lane order of a type.
  static Vec evens(const float* x, const bf16*) { return load(x); }
  static Vec odds(const float* x, const bf16*) { return load(x + kLanes); }
  static Vec evens(const float* x, const float*) { return every_second(x, 0); }
  static Vec odds(const float* x, const float*) { return every_second(x, 1); }

  static Vec every_second(const float* x, int first) {
    float pair[kPair];
    store_in_lane_order(pair, load(x), load(x + kLanes), static_cast<const bf16*>(nullptr));
    return load(pair + first * kLanes);
  }
};

// A matrix [rows, K], rows one after another.
struct TileMatrix {
  const bf16* data;
  int64_t K;

  const bf16* row(int64_t index) const { return data + index * K; }
  TileMatrix behind(int64_t rows) const { return {row(rows), K}; }
};

// A thread's product of some rows with up to 32 tokens. Tiles 0 to 3 are sums, [2 row blocks,
// 2 token blocks]; 4 and 5 are weights of both row blocks, 6 and 7 parts of activations.
class TileProduct {
 public:
  TileProduct(const TileMatrix& weights, const TileInputs& x) : weights_(weights), x_(x) {}

  // sums[c][r][t] of row block c / 2 and token block c % 2. As many rows at `ahead` are prefetched.
  template <int kTokenBlocks>
  void run(int64_t row, int64_t num_rows, int64_t block, int64_t ahead, float* sums) {
    clear<kTokenBlocks>();
    const int64_t K = weights_.K, whole = num_rows == kRowBlock ? K / kTileInputs : 0;
    const bf16 *w = weights_.row(row), *next = weights_.row(row + ahead);  // in order of memory
    for (int64_t step = 0; step < TileInputs::num_steps(K); ++step, w += kTileInputs) {
      if (ahead)
        for (int64_t line = 0; line < kRowBlock; ++line, next += kTileInputs)
          __builtin_prefetch(next, 0, kToL2);
      if (step < whole) {
        tiles_.load<4>(w, K * sizeof(bf16));
        tiles_.load<5>(w + kTileRows * K, K * sizeof(bf16));
      } else {
        load_rest(w, num_rows, std::min(kTileInputs, K - step * kTileInputs));
      }
      multiply<0>(block, step);
      if (kTokenBlocks == 2) multiply<1>(block + 1, step);
    }
    put_sums<kTokenBlocks>(sums);
  }

 private:
  const TileMatrix weights_;
  const TileInputs& x_;
  Tiles tiles_;

  template <int kTokenBlocks>
  void clear() {
    tiles_.zero<0>();
    if (kTokenBlocks == 2) tiles_.zero<1>();
    tiles_.zero<2>();
    if (kTokenBlocks == 2) tiles_.zero<3>();
  }

  template <int kToken>
  void multiply(int64_t block, int64_t step) {
    tiles_.load<6>(x_.tile(block, step, 0), kTileRowBytes);
    tiles_.multiply<kToken, 4, 6>();
    tiles_.multiply<2 + kToken, 5, 6>();
    tiles_.load<7>(x_.tile(block, step, 1), kTileRowBytes);
    tiles_.multiply<kToken, 4, 7>();
    tiles_.multiply<2 + kToken, 5, 7>();
  }

  template <int kTokenBlocks>
  void put_sums(float* sums) {
    tiles_.store<0>(sums, kTileRowBytes);
    if (kTokenBlocks == 2) tiles_.store<1>(sums + 256, kTileRowBytes);
    tiles_.store<2>(sums + 512, kTileRowBytes);
    if (kTokenBlocks == 2) tiles_.store<3>(sums + 768, kTileRowBytes);
  }

  // Weights at the end of a matrix, zeros beyond.
  void load_rest(const bf16* w, int64_t num_rows, int64_t num_inputs) {
    alignas(64) bf16 rest[kRowBlock * kTileInputs] = {};
    for (int64_t r = 0; r < num_rows; ++r)
      std::copy(w + r * weights_.K, w + r * weights_.K + num_inputs, rest + r * kTileInputs);
    tiles_.load<4>(rest, kTileRowBytes);
    tiles_.load<5>(rest + kTileRows * kTileInputs, kTileRowBytes);
  }
};

// Sums [2 row blocks, 2 token blocks, 16 rows, 16 tokens] to [..., 16 tokens, 16 rows].
inline void by_token(float* sums, int64_t num_tokens) {
  for (int64_t rows = 0; rows < 2; ++rows)
    for (int64_t block = 0; block * kTileColumns < num_tokens; ++block)
      transpose_tile(sums + rows * 512 + block * 256);
}

// Weight rows `rows` against all tokens; as many `ahead` are prefetched meanwhile.
template <class Put>
inline void all_tokens(const TileMatrix& weights, Range rows, const TileInputs& x,
                       int64_t num_tokens, int64_t ahead, const Put& put) {
  alignas(64) float sums[4 * 256];
  TileProduct product(weights, x);
  for (int64_t first = 0; first < num_tokens; first += 2 * kTileColumns) {
    const int64_t tokens = std::min(2 * kTileColumns, num_tokens - first);
    const int64_t block = first / kTileColumns, rows_ahead = first ? 0 : ahead;
    for (int64_t row = rows.begin; row < rows.end; row += kRowBlock) {
      const int64_t count = std::min(kRowBlock, rows.end - row);
      if (tokens > kTileColumns) product.run<2>(row, count, block, rows_ahead, sums);
      else product.run<1>(row, count, block, rows_ahead, sums);
      by_token(sums, tokens);
      for (int64_t t = 0; t < tokens; ++t) {
        const float* const found = sums + t / 16 * 256 + t % 16 * 16;
        const auto put_row = [&](int64_t r) INLINE {
          put(first + t, row + r, found[r / 16 * 512 + r % 16]);
        };
        if (count == kRowBlock) {  // a loop that becomes a few vectors
          _Pragma("GCC ivdep") for (int64_t r = 0; r < kTileRows; ++r) put_row(r);
          _Pragma("GCC ivdep") for (int64_t r = kTileRows; r < kRowBlock; ++r) put_row(r);
        } else {
          for (int64_t r = 0; r < count; ++r) put_row(r);
        }
      }
    }
  }
}

// All of `rows`: put(token, row, value) for each output.
template <class Put>
inline void matmul(const TileMatrix& weights, Range rows, const TileInputs& x, int64_t num_tokens,
                   const Put& put) {
  const int64_t step = tile_panel_rows(num_tokens);
  for (int64_t row = rows.begin; row < rows.end; row += step) {
    const int64_t end = std::min(row + step, rows.end);
    all_tokens(weights, Range{row, end}, x, num_tokens,
               std::max<int64_t>(0, std::min(end - row, rows.end - end)), put);
  }
}

}  // namespace foredraft
