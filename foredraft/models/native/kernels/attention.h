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
// of weight * value. `put(q, pair, Pair)` takes the sums.
template <int Q, int P, class Weight, class Put>
inline void weigh_values(const Visible& visible, const Weight* values_CD, int64_t D, int64_t d,
                         const float* weights, int64_t stride, const Put& put) {
  Pair sum[Q][P] = {};
  const int64_t left = D - d;
  const auto add = [&](int64_t rank, int64_t entry) {
    Vec weight[Q];
    for (int q = 0; q < Q; ++q) weight[q] = broadcast(weights[q * stride + rank]);
    for (int p = 0; p < P; ++p) {
      const Pair value = load_pair(values_CD + entry * D + d + p * kPair,
                                   P > 1 ? kPair : std::min<int64_t>(left, kPair));
      for (int q = 0; q < Q; ++q) {
        sum[q][p].first = fma(weight[q], value.first, sum[q][p].first);
        sum[q][p].second = fma(weight[q], value.second, sum[q][p].second);
      }
    }
  };
  for (int64_t rank = 0; rank < visible.prefix; ++rank) add(rank, rank);
  for (int64_t i = 0; i < visible.num_extras; ++i) add(visible.prefix + i, visible.extras[i]);
  for (int q = 0; q < Q; ++q)
    for (int p = 0; p < P; ++p) put(q, d + p * kPair, sum[q][p]);
}

// All dimensions of Q queries of one token.
template <int Q, class Weight, class Put>
inline void attend(const Visible& visible, const Weight* values_CD, int64_t D,
                   const float* weights, int64_t stride, const Put& put) {
  int64_t d = 0;
  for (; d + 2 * kPair <= D; d += 2 * kPair)
    weigh_values<Q, 2>(visible, values_CD, D, d, weights, stride, put);
  for (; d < D; d += kPair) weigh_values<Q, 1>(visible, values_CD, D, d, weights, stride, put);
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

  // put(token, head of the group, dimension, value) takes each attended value.
  template <class Put>
  void run(const Put& put) const {
    int64_t end = 0;
    for (int64_t t = 0; t < num_tokens; ++t) end = std::max(end, visible[t].end());
    matmul(Matrix<Weight>{keys_CD, D}, Range{0, end}, queries, num_tokens * group,
           [&](int64_t query, int64_t entry, float score) {
             scores[query * score_stride + entry] = score;
           });
    for (int64_t t = 0; t < num_tokens; ++t) attend_token(t, put);
  }

 private:
  template <class Put>
  void attend_token(int64_t token, const Put& put) const {
    const Visible& seen = visible[token];
    const auto weights = [&](int64_t head) {
      return scores + (token * group + head) * score_stride;
    };
    for (int64_t head = 0; head < group;) {
      const int64_t num_heads = std::min<int64_t>(3, group - head);
      float scale[3];
      for (int64_t q = 0; q < num_heads; ++q) {
        order_by_rank(seen, weights(head + q));
        scale[q] = softmax(weights(head + q), seen.count());
      }
      const auto put_pair = [&](int q, int64_t d, const Pair& sum) {
        float values[kPair];
        store(values, sum.first);
        store(values + kLanes, sum.second);
        for (int64_t i = 0; i < kPair && d + i < D; ++i)
          put(token, head + q, d + i, values[lane_order<Weight>(i)] * scale[q]);
      };
      const float* first = weights(head);
      if (num_heads == 3) attend<3>(seen, values_CD, D, first, score_stride, put_pair);
      else if (num_heads == 2) attend<2>(seen, values_CD, D, first, score_stride, put_pair);
      else attend<1>(seen, values_CD, D, first, score_stride, put_pair);
      head += num_heads;
    }
  }
};

}  // namespace foredraft
