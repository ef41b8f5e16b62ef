// Attention of the tokens of one forward over the cache entries they see.
//
// Shape legend: T tokens, G query heads that share a key-value head, M = tokens * G queries of a
// tile, C cache entries, D head size.
//
// A token sees the first `prefix` entries of its slot and then, in a tree, its ancestors and itself
// (`extras`, ascending). Its scores are laid out by rank among the entries it sees, and maximum,
// sum and weighted values run over ranks, never over entries. So the same context gives the same
// bits wherever the entries lie and whoever else is in the forward.
#pragma once

#include <cmath>

#include "matmul.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kAttendedHeads = 3;  // query heads whose values are summed together

// What one token sees.
struct Visible {
  int64_t prefix;
  const int32_t* extras;
  int64_t num_extras;

  int64_t count() const { return prefix + num_extras; }
  int64_t end() const { return num_extras ? extras[num_extras - 1] + 1 : prefix; }
};

// Moves the scores of the extras behind those of the prefix. Ranks never exceed entries, so nothing
// is overwritten before it is read.
inline void order_by_rank(const Visible& visible, float* scores) {
  for (int64_t i = 0; i < visible.num_extras; ++i)
    scores[visible.prefix + i] = scores[visible.extras[i]];
}

// Scores to unnormalised weights e^(score - max), in place; returns one over their sum. The array
// has room for whole vectors.
inline float softmax(float* scores, int64_t count) {
  const float low = -INFINITY;
  for (int64_t i = count; i % kLanes; ++i) scores[i] = low;
  Vec most = load(scores);
  for (int64_t i = kLanes; i < count; i += kLanes) most = max(load(scores + i), most);
  const Vec shift = broadcast(max_lanes(most));
  Vec sum{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec weight = exp(load(scores + i) - shift);
    store(scores + i, weight);
    sum += weight;
  }
  return 1.0f / sum_lanes(sum);
}

// Dimensions [d, d + P pairs) of the attended values of Q queries of one token: the sum over ranks
// of weight * value, in lane order. Row q goes to out + q * out_stride.
template <int Q, int P, class Weight>
inline void weigh_values(const Visible& visible, const Weight* values_CD, int64_t D, int64_t d,
                         const float* weights, int64_t stride, float* out) {
  Vec sum[Q][2 * P];
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i) sum[q][i] = Vec{};
  const int64_t rest = std::min<int64_t>(D - d, P * kPair);
  const auto add = [&](int64_t rank, int64_t entry) INLINE {
    const Weight* value = values_CD + entry * D + d;
    Weight padded_value[P * kPair];
    if (rest < P * kPair) {
      std::fill(std::copy(value, value + rest, padded_value), padded_value + P * kPair, Weight{});
      value = padded_value;
    }
    Vec weight[Q];
    UNROLL for (int q = 0; q < Q; ++q) weight[q] = broadcast(weights[q * stride + rank]);
    UNROLL for (int p = 0; p < P; ++p) {
      const Vec first = load_first(value + p * kPair);
      UNROLL for (int q = 0; q < Q; ++q) add_product(sum[q][2 * p], weight[q], first);
      const Vec second = load_second(value + p * kPair);
      UNROLL for (int q = 0; q < Q; ++q) add_product(sum[q][2 * p + 1], weight[q], second);
    }
  };
  for (int64_t rank = 0; rank < visible.prefix; ++rank) add(rank, rank);
  for (int64_t i = 0; i < visible.num_extras; ++i) add(visible.prefix + i, visible.extras[i]);
  UNROLL for (int q = 0; q < Q; ++q)
    UNROLL for (int i = 0; i < 2 * P; ++i) store(out + q * padded(D) + d + i * kLanes, sum[q][i]);
}

// All dimensions of Q queries of one token: out[q * padded(D)], in lane order.
template <int Q, class Weight>
inline void attend(const Visible& visible, const Weight* values_CD, int64_t D,
                   const float* weights, int64_t stride, float* out) {
  constexpr int P = Q == 1 ? 4 : 2;  // running sums of one query alone must hide the latency
  int64_t d = 0;
  for (; d + P * kPair <= D; d += P * kPair)
    weigh_values<Q, P>(visible, values_CD, D, d, weights, stride, out);
  for (; d < D; d += kPair)
    weigh_values<Q, 1>(visible, values_CD, D, d, weights, stride, out);
}

// One tile: some tokens of a row at one key-value head.
template <class Weight>
struct AttentionTile {
  const Weight* keys_CD;
  const Weight* values_CD;
  int64_t D;
  int64_t group;          // G
  Activations queries;    // [M, D], scaled; the G heads of a token are neighbours
  const Visible* visible; // [T]
  int64_t num_tokens;     // T
  float* scores;          // scratch [M, score_stride]
  int64_t score_stride;

  float* attended;        // scratch [kAttendedHeads, D], in lane order

  // put(token, head of the group, values [D] in lane order, factor) takes what a head attended.
  template <class Put>
  void run(const Put& put) const {
    int64_t end = 0;
    for (int64_t t = 0; t < num_tokens; ++t) end = std::max(end, visible[t].end());
    matmul(Matrix<Weight>{keys_CD, D}, Range{0, end}, queries, num_tokens * group,
           [&](int64_t query, int64_t entry, float score) {
             scores[query * score_stride + entry] = score;
           });
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t head = 0; head < group; head += kAttendedHeads)
        attend_heads(t, head, std::min(kAttendedHeads, group - head), put);
  }

 private:
  template <class Put>
  void attend_heads(int64_t token, int64_t head, int64_t num_heads, const Put& put) const {
    const Visible& seen = visible[token];
    float* weights = scores + (token * group + head) * score_stride;
    float factor[kAttendedHeads];
    for (int64_t q = 0; q < num_heads; ++q) {
      order_by_rank(seen, weights + q * score_stride);
      factor[q] = softmax(weights + q * score_stride, seen.count());
    }
    if (num_heads == 3) attend<3>(seen, values_CD, D, weights, score_stride, attended);
    else if (num_heads == 2) attend<2>(seen, values_CD, D, weights, score_stride, attended);
    else attend<1>(seen, values_CD, D, weights, score_stride, attended);
    for (int64_t q = 0; q < num_heads; ++q) put(token, head + q, attended + q * padded(D), factor[q]);
  }
};

}  // namespace foredraft
