// Keyed Gumbel noise, and the tokens that win with it: the compiled half of core/noise.py, which
// says what the noise is and why nothing here can change its bits.
//
// All arithmetic on doubles is IEEE +, -, * and / on its own (the build forbids fused
// multiply-adds), in the order that core/noise.py has too.
//
// Shape legend: N rows, V vocabulary, K tokens wanted of each row.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "draw.h"
#include "filter.h"

using namespace foredraft::noise;

extern "C" {

struct ForedraftNoiseRow {
  uint64_t seed, position;
  double scale;
};

}  // extern "C"

namespace {

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

// The token that wins of those whose logit is not below the cut; -1 if the largest logit is not finite.
__attribute__((visibility("default"))) int64_t foredraft_gumbel_argmax(
    const void* logits, int64_t is_double, int64_t vocab, uint64_t seed, uint64_t position,
    double scale, double cut) {
  int64_t token;
  double score;
  Best best(1, &token, &score);
  const Key key{seed, position};
  const bool ok =
      is_double ? Row(static_cast<const double*>(logits), vocab, key, scale, cut).find(best)
                : Row(static_cast<const float*>(logits), vocab, key, scale, cut).find(best);
  return ok ? token : -1;
}

// The first of the largest logits, -1 if it is not finite or one is NaN; and the smallest logit that the
// filters leave.
__attribute__((visibility("default"))) int64_t foredraft_filter(
    const float* logits, int64_t vocab, int64_t top_k, double top_p, double min_p, double scale,
    double* cut) {
  Row<float> row(logits, vocab, Key{}, scale);
  const int64_t token = row.find_largest();
  if (token >= 0) *cut = cut_of(row, logits, vocab, Filters{top_k, top_p, min_p, float(scale)});
  return token;
}

// Draws from each of the rows that are wanted.
__attribute__((visibility("default"))) void foredraft_draw_rows(
    const void* logits, int64_t is_double, int64_t vocab, int64_t count, ForedraftDraw* draws) {
  for (int64_t i = 0; i < count; ++i)
    is_double ? draw(static_cast<const double*>(logits), vocab, draws[i])
              : draw(static_cast<const float*>(logits), vocab, draws[i]);
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
