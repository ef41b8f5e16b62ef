// Keyed Gumbel noise, and the tokens that win with it: the compiled half of core/noise.py, which
// says what the noise is and why nothing here can change its bits.
//
// All arithmetic on doubles is IEEE +, -, * and / on its own (the build forbids fused
// multiply-adds), in the order that core/noise.py has too. What is skipped cannot win: rounding
// never turns an order round, so with x <= X and g <= G also fl(x + g) <= fl(X + G).
//
// Shape legend: N rows, V vocabulary, K tokens wanted of each row.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gumbel.h"

using namespace foredraft;

namespace {

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
  Row(const Logit* logits, int64_t vocab, Key key, double scale)
      : logits_(logits), key_(key), scale_(scale), num_whole_(vocab / kGroup) {
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

  // False where there is no largest logit (see there).
  bool find(Best& best) { return find_maxima() && find_known(best); }

  // The same after `find_largest`.
  bool find_known(Best& best) const {
    const int64_t first = std::max_element(group_max_.begin(), group_max_.end()) - group_max_.begin();
    visit(first, best);  // likely to hold the winner
    for (int64_t group = 0; group < num_groups_; ++group)
      if (group != first) visit(group, best);
    return true;
  }

 private:
  const Logit* logits_;
  const Key key_;
  const double scale_;
  const int64_t num_whole_;
  int64_t num_groups_;
  Logit rest_[kGroup];  // the last tokens, filled up with ones that cannot occur
  std::vector<Logit> group_max_;
  double base_;

  const Logit* group_logits(int64_t group) const {
    return group < num_whole_ ? logits_ + group * kGroup : rest_;
  }

  double scaled(Logit logit) const { return (double(logit) - base_) * scale_; }

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

}  // namespace

extern "C" {

struct ForedraftNoiseRow {
  uint64_t seed, position;
  double scale;
};

}  // extern "C"

namespace {

template <class Logit>
void draw_row(const Logit* logits, int64_t vocab, const ForedraftNoiseRow& key, int64_t* token,
              int64_t* best, double* most) {
  Row row(logits, vocab, Key{key.seed, key.position}, key.scale);
  *token = *best = row.find_largest();
  *most = row.largest();
  if (*best < 0 || key.scale == 0) return;
  double score;
  Best drawn(1, token, &score);
  row.find_known(drawn);
}

// Tokens that a head has output rows for, ascending: those of group g are 256 g + lows[r], with r
// from starts[g] on.
struct Named {
  const uint8_t* lows;
  const int64_t* starts;
  int64_t num_groups;
};

// Tokens with logits besides.
struct Others {
  const int64_t* tokens;
  const double* logits;
  int64_t count;
};

inline double noise_of(Key key, uint32_t token) {
  return gumbel(random_52(key, token, coarse_byte(key, token)));
}

SEPARATE float largest_of(const float* __restrict logits, int64_t count, int* strange) {
  float most[kLanes];
  std::fill(most, most + kLanes, -std::numeric_limits<float>::infinity());
  int64_t r = 0;
  for (; r + kLanes <= count; r += kLanes)
    for (int i = 0; i < kLanes; ++i) {
      most[i] = larger(most[i], logits[r + i]);
      *strange |= logits[r + i] != logits[r + i];
    }
  for (; r < count; ++r) {
    most[0] = larger(most[0], logits[r]);
    *strange |= logits[r] != logits[r];
  }
  return *std::max_element(most, most + kLanes);
}

// The same as `Row::find` of logits that are -inf for all tokens without a row.
bool find_named(const float* logits, const Named& named, const Others& others, Key key, double scale,
                Best& best) {
  int strange = 0;
  double base = double(largest_of(logits, named.starts[named.num_groups], &strange));
  for (int64_t i = 0; i < others.count; ++i) base = larger(base, others.logits[i]);
  if (strange || !(base - base == 0)) return false;
  for (int64_t i = 0; i < others.count; ++i)
    best.offer(others.tokens[i], (others.logits[i] - base) * scale +
                                     noise_of(key, uint32_t(others.tokens[i])));
  for (int64_t group = 0; group < named.num_groups; ++group) {
    const int64_t first = named.starts[group], end = named.starts[group + 1];
    if (first == end) continue;
    uint32_t words[4 * kLanes];
    philox(key, uint32_t(group) * kLanes, words);
    uint8_t coarse[kGroup];
    std::memcpy(coarse, words, sizeof coarse);
    for (int64_t r = first; r < end; ++r) {
      const uint8_t byte = coarse[named.lows[r]];
      const double score = (double(logits[r]) - base) * scale;
      if (score + kBounds.of[byte] < best.floor() || score == kNever) continue;
      const int64_t token = group * kGroup + named.lows[r];
      const uint64_t bits = random_52(key, uint32_t(token), byte);
      if (score + close_bound(bits) >= best.floor()) best.offer(token, score + gumbel(bits));
    }
  }
  return true;
}

}  // namespace

extern "C" {

// The K best tokens of each row of R named ones and of others, which end at ends[n]; otherwise as
// foredraft_gumbel_top.
__attribute__((visibility("default"))) int64_t foredraft_gumbel_top_named(
    const float* logits, int64_t num_rows, int64_t num_named, const uint8_t* lows,
    const int64_t* starts, int64_t num_groups, const int64_t* ends, const int64_t* other_tokens,
    const double* other_logits, const ForedraftNoiseRow* rows, int64_t wanted, int64_t* tokens,
    double* scores, int64_t* found) {
  const Named named{lows, starts, num_groups};
  for (int64_t n = 0; n < num_rows; ++n) {
    const int64_t begin = n ? ends[n - 1] : 0;
    const Others others{other_tokens + begin, other_logits + begin, ends[n] - begin};
    Best best(wanted, tokens + n * wanted, scores + n * wanted);
    if (!find_named(logits + n * num_named, named, others, Key{rows[n].seed, rows[n].position},
                    rows[n].scale, best))
      return n;
    found[n] = best.found();
  }
  return num_rows;
}

// The K best tokens of each row, best first; the number of rows done, which is smaller than N when
// the next one has no finite largest logit. tokens and scores are [N, K], found [N].
__attribute__((visibility("default"))) int64_t foredraft_gumbel_top(
    const void* logits, int64_t is_double, int64_t num_rows, int64_t vocab,
    const ForedraftNoiseRow* rows, int64_t wanted, int64_t* tokens, double* scores,
    int64_t* found) {
  for (int64_t n = 0; n < num_rows; ++n) {
    const Key key{rows[n].seed, rows[n].position};
    Best best(wanted, tokens + n * wanted, scores + n * wanted);
    const bool ok =
        is_double
            ? Row(static_cast<const double*>(logits) + n * vocab, vocab, key, rows[n].scale).find(best)
            : Row(static_cast<const float*>(logits) + n * vocab, vocab, key, rows[n].scale).find(best);
    if (!ok) return n;
    found[n] = best.found();
  }
  return num_rows;
}

// Of each of `count` rows the token drawn (the likeliest where the scale is 0), the likeliest, and
// its logit; tokens are -1 where there is none.
__attribute__((visibility("default"))) void foredraft_draw_rows(
    const void* logits, int64_t is_double, int64_t vocab, int64_t count, const int64_t* rows,
    const ForedraftNoiseRow* keys, int64_t* tokens, int64_t* best, double* most) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = rows[i] * vocab;
    if (is_double)
      draw_row(static_cast<const double*>(logits) + start, vocab, keys[i], tokens + i, best + i,
               most + i);
    else
      draw_row(static_cast<const float*>(logits) + start, vocab, keys[i], tokens + i, best + i,
               most + i);
  }
}

// The noise of each of `count` tokens.
__attribute__((visibility("default"))) void foredraft_gumbel_noise(
    const int64_t* tokens, int64_t count, uint64_t seed, uint64_t position, double* noise) {
  const Key key{seed, position};
  for (int64_t i = 0; i < count; ++i) {
    noise[i] = noise_of(key, uint32_t(tokens[i]));
  }
}

}  // extern "C"
