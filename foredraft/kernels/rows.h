// What is done to single rows of floats: norms, rotary angles, padding.
//
// Shape legend: see worker.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "interface.h"
#include "simd.h"

namespace foredraft {

// The heads of a kind of layers. What a layer computes of queries, keys and values has rows of qkv_rows,
// those of queries in front, also where it reads another's entries and has no others.
struct Heads {
  const int64_t H, num_kv, D, G, query_rows, qkv_rows;

  Heads(const ForedraftModel& model, int64_t kind)
      : H(model.num_heads), num_kv(model.heads[kind].num_kv_heads), D(model.heads[kind].head_dim),
        G(H / num_kv), query_rows(H * D * (model.gates_attention ? 2 : 1)),
        qkv_rows(query_rows + 2 * num_kv * D) {}
};

constexpr double kLatentEps = 1e-6;  // of norms of latents, whatever others have

// Zeros behind row `row` of rows that are padded to whole pairs.
inline void pad_with_zeros(float* rows, int64_t row, int64_t size) {
  const int64_t whole = padded(size), last = size - size % kPair;
  std::fill(rows + row * whole + last, rows + (row + 1) * whole, 0.0f);
}

inline float mean_of(const float* x, int64_t size) {
  Vec sum{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += load(x + i);
  float rest[kLanes] = {};
  std::copy(x + i, x + size, rest);
  return sum_lanes(sum + load(rest)) / float(size);
}

// 1 / root mean square of a row, behind a mean.
inline float inverse_rms(const float* x, int64_t size, double eps, float behind = 0) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec some = load(x + i) - broadcast(behind);
    squares = fma(some, some, squares);
  }
  float rest[kLanes] = {};
  for (int64_t k = 0; i + k < size; ++k) rest[k] = x[i + k] - behind;
  squares = fma(load(rest), load(rest), squares);
  const float mean = sum_lanes(squares) / float(size);
  return 1.0f / std::sqrt(mean + float(eps));
}

// The norm of a token's queries, or keys: of each head by itself, or of all heads together.
class HeadNorm {
 public:
  HeadNorm(const ForedraftModel& model, int64_t D, const float* weight, const float* heads,
           int64_t num_heads)
      : D_(D), eps_(model.norm_eps), weight_(weight) {
    if (weight && model.norms_all_heads) all_ = inverse_rms(heads, num_heads * D_, eps_);
  }

  // Normalises the numbers of a head.
  void apply(float* x, int64_t head) const {
    if (!weight_) return;
    const float scale = all_ ? all_ : inverse_rms(x, D_, eps_);
    const float* const weight = weight_ + (all_ ? head * D_ : 0);
    for (int64_t i = 0; i < D_; ++i) x[i] = weight[i] * (x[i] * scale);
  }

 private:
  const int64_t D_;
  const double eps_;
  const float* const weight_;
  float all_ = 0;  // scale of all heads; 0: each has its own
};

// Turns the first `size` numbers of a head, in pairs of its halves.
inline void rotate_head(float* x, const float* cosine, const float* sine, int64_t size) {
  for (int64_t i = 0; i < size / 2; ++i) {
    const float first = x[i], second = x[i + size / 2];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + size / 2] = second * cosine[i] + first * sine[i];
  }
}

}  // namespace foredraft
