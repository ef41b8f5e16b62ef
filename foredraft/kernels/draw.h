// Tokens drawn from rows of logits: which wins with keyed Gumbel noise (gumbel.h). Most are passed over.
//
// What is skipped cannot win: rounding never turns an order round, so with x <= X and g <= G also
// fl(x + g) <= fl(X + G).
//
// Shape legend: N rows, V vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gumbel.h"

extern "C" {

// Mirrored in core/draws.py.
struct ForedraftDraw {
  int64_t row;  // of the logits
  uint64_t seed, position;
  double scale;         // of the logits; 0: the likeliest token
  int64_t token, best;  // drawn, and likeliest; -1 if the largest logit is not a finite number
  double logit;         // of the likeliest
  double chance;        // of the drawn one among those that come first; 0: not computed
};

}  // extern "C"

namespace foredraft {
namespace noise {

template <class Logit>
inline Logit larger(Logit a, Logit b) {
  return a > b ? a : b;
}

// Maxima of a group's columns; whether there is a NaN.
template <class Logit>
SEPARATE int group_maxima(const Logit* __restrict logits, Logit* __restrict most) {
  int strange = 0;
  for (int i = 0; i < kColumns; ++i) {
    const Logit a = logits[i], b = logits[kColumns + i];
    const Logit c = logits[2 * kColumns + i], d = logits[3 * kColumns + i];
    most[i] = larger(larger(a, b), larger(c, d));
    strange |= (a != a) | (b != b) | (c != c) | (d != d);
  }
  return strange;
}

// The largest logit of a group; `strange` is set if there is a NaN.
template <class Logit>
SEPARATE Logit group_maximum(const Logit* __restrict logits, int* strange) {
  Logit most[kColumns];
  *strange |= group_maxima(logits, most);
#pragma GCC unroll 6
  for (int width = kColumns / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) most[i] = larger(most[i], most[width + i]);
  return most[0];
}

// One row: its logits in groups of kGroup tokens, of which each column holds four.
template <class Logit>
class Row {
 public:
  // A token whose logit is below the cut cannot occur.
  Row(const Logit* logits, int64_t vocab, Key key, double scale, double cut = kNever)
      : logits_(logits), key_(key), scale_(scale), cut_(Logit(cut)), num_whole_(vocab / kGroup) {
    std::fill(rest_, rest_ + kGroup, -std::numeric_limits<Logit>::infinity());
    std::copy(logits + num_whole_ * kGroup, logits + vocab, rest_);
    num_groups_ = num_whole_ + (vocab % kGroup != 0);
    group_max_.resize(num_groups_);
  }

  // The first of the largest logits; -1 if it is not a finite number, or a logit is NaN.
  int64_t find_largest() {
    if (!find_maxima()) return -1;
    const int64_t first = std::max_element(group_max_.begin(), group_max_.end()) - group_max_.begin();
    const Logit* logits = group_logits(first);
    return first * kGroup + (std::find(logits, logits + kGroup, group_max_[first]) - logits);
  }

  double largest() const { return base_; }
  const std::vector<Logit>& group_max() const { return group_max_; }

  // False where there is no largest logit (see there).
  bool find(Best& best) {
    if (!find_maxima()) return false;
    find_known(best);
    return true;
  }

  // The likeliest tokens, after `find_largest`.
  void find_likeliest(Best& best) const {
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (double(group_max_[group]) < best.floor()) continue;
      const Logit* logits = group_logits(group);
      for (int64_t i = 0; i < kGroup; ++i)
        if (double(logits[i]) >= best.floor()) best.offer(group * kGroup + i, double(logits[i]));
    }
  }

  // What the noise makes first, after `find_largest`.
  void find_known(Best& best) const {
    const int64_t first = std::max_element(group_max_.begin(), group_max_.end()) - group_max_.begin();
    visit(first, best);  // likely to hold the winner
    for (int64_t group = 0; group < num_groups_; ++group)
      if (group != first) visit(group, best);
  }

 private:
  const Logit* logits_;
  const Key key_;
  const double scale_;
  const Logit cut_;
  const int64_t num_whole_;
  int64_t num_groups_;
  Logit rest_[kGroup];  // the last tokens, filled up with ones that cannot occur
  std::vector<Logit> group_max_;
  double base_;

  const Logit* group_logits(int64_t group) const {
    return group < num_whole_ ? logits_ + group * kGroup : rest_;
  }

  double scaled(Logit logit) const {
    return logit < cut_ ? kNever : (double(logit) - base_) * scale_;
  }

  bool find_maxima() {
    int strange = 0;
    for (int64_t group = 0; group < num_groups_; ++group)
      group_max_[group] = group_maximum(group_logits(group), &strange);
    const Logit largest = *std::max_element(group_max_.begin(), group_max_.end());
    base_ = double(largest);
    return !strange && largest - largest == 0;
  }

  void visit(int64_t group, Best& best) const {
    const double most = scaled(group_max_[group]);
    if (most == kNever || most + kBounds.of[0] < best.floor()) return;
    uint32_t words[4 * kLanes];
    philox(key_, uint32_t(group) * kLanes, words);
    uint8_t coarse[kGroup], column_min[kColumns];
    std::memcpy(coarse, words, sizeof coarse);
    if (most + kBounds.of[1] < best.floor()) return visit_loudest(group, coarse, best);
    for (int i = 0; i < kColumns; ++i) {
      const uint8_t a = std::min(coarse[i], coarse[kColumns + i]);
      const uint8_t b = std::min(coarse[2 * kColumns + i], coarse[3 * kColumns + i]);
      column_min[i] = std::min(a, b);
    }
    int limit = 0;  // a larger byte cannot win, not even with the largest logit
    while (limit < 255 && most + kBounds.of[limit + 1] >= best.floor()) ++limit;
    Logit column_max[kColumns];
    group_maxima(group_logits(group), column_max);
    uint8_t hopeful[kColumns];
    for (int i = 0; i < kColumns; ++i) hopeful[i] = column_min[i] <= limit;
    for (int start = 0; start < kColumns; start += 8) {
      uint64_t eight;
      std::memcpy(&eight, hopeful + start, sizeof eight);
      for (; eight; eight &= eight - 1) {
        const int i = start + __builtin_ctzll(eight) / 8;
        if (scaled(column_max[i]) + kBounds.of[column_min[i]] >= best.floor())
          visit_column(group, i, coarse, best);
      }
    }
  }

  // Of a group where no other coarse byte than 0 can win: one token in 256, and most groups.
  void visit_loudest(int64_t group, const uint8_t* coarse, Best& best) const {
    for (int start = 0; start < kGroup; start += 8) {
      uint64_t eight;
      std::memcpy(&eight, coarse + start, sizeof eight);
      if (!((eight - 0x0101010101010101) & ~eight & 0x8080808080808080)) continue;
      for (int i = start; i < start + 8; ++i)
        if (coarse[i] == 0) visit_token(group, i, 0, best);
    }
  }

  void visit_column(int64_t group, int column, const uint8_t* coarse, Best& best) const {
    for (int i = column; i < kGroup; i += kColumns) visit_token(group, i, coarse[i], best);
  }

  void visit_token(int64_t group, int i, uint8_t coarse, Best& best) const {
    const double score = scaled(group_logits(group)[i]);
    if (score == kNever || score + kBounds.of[coarse] < best.floor()) return;
    const int64_t token = group * kGroup + i;
    const uint64_t r = random_52(key_, uint32_t(token), coarse);
    if (score + close_bound(r) >= best.floor()) best.offer(token, score + gumbel(r));
  }
};

// Fills in what is found.
template <class Logit>
void draw(const Logit* logits, int64_t vocab, ForedraftDraw& wanted) {
  Row row(logits + wanted.row * vocab, vocab, Key{wanted.seed, wanted.position}, wanted.scale);
  wanted.token = wanted.best = row.find_largest();
  wanted.logit = row.largest();
  if (wanted.best < 0 || wanted.scale == 0) return;
  double score;
  Best drawn(1, &wanted.token, &score);
  row.find_known(drawn);
}

// So many tokens may win a draw by logits that are estimates, and so many others by their own.
constexpr int64_t kMostHopeful = 16, kMostOthers = 64;

// The tokens that come first by a row of estimated logits and the noise; returns how many. Few estimates change
// the order by more than a place or two.
template <class Logit>
int64_t find_hopeful(const Logit* logits, int64_t vocab, const ForedraftDraw& wanted, int64_t* tokens) {
  Row row(logits, vocab, Key{wanted.seed, wanted.position}, wanted.scale);
  double scores[kMostHopeful];
  Best best(kMostHopeful, tokens, scores);
  if (row.find_largest() < 0) return 0;
  if (wanted.scale == 0) row.find_likeliest(best);
  else row.find_known(best);
  return best.found();
}

// The winner among some tokens, given their logits.
inline void draw_among(const float* logits, const int64_t* tokens, int64_t count, ForedraftDraw& wanted) {
  wanted.token = wanted.best = -1;
  if (!count) return;
  double sums[kMostHopeful + kMostOthers], score = 0;
  Best best(1, &wanted.best, &wanted.logit), drawn(1, &wanted.token, &score);
  for (int64_t i = 0; i < count; ++i) best.offer(tokens[i], double(logits[i]));
  const Key key{wanted.seed, wanted.position};
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t token = uint32_t(tokens[i]);
    sums[i] = double(logits[i]) - wanted.logit;
    if (wanted.scale != 0)
      sums[i] = sums[i] * wanted.scale + gumbel(random_52(key, token, coarse_byte(key, token)));
    drawn.offer(token, sums[i]);
  }
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += std::exp(sums[i] - score);
  wanted.chance = 1 / total;
}

}  // namespace noise
}  // namespace foredraft
