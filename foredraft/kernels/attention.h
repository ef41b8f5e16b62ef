// Attention of some tokens of a row over the cache entries they see.
//
// Shape legend: T tokens of a tile, G query heads that share a key-value head, M = T * G queries of
// a tile, D head size.
//
// A token sees the first `prefix` entries of its slot and then, in a tree, its ancestors and itself
// (`extras`, ascending). What it sees is ranked in this order, and everything is defined over ranks,
// never over entries: the ranks are taken in chunks of kChunk, each chunk has its own maximum, sum
// and weighted values, taken up in the order of ranks, and chunks are folded together from the first
// to the last. So the same context gives the same bits wherever the entries lie, whoever else is in
// the forward and whichever threads compute the chunks.
//
// Speed comes from reading keys and values once for all queries of a tile. How scores and weighted
// values are computed is the arithmetic's: attention_floats.h, attention_tiles.h.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "entries.h"
#include "softmax.h"
#include "team.h"

namespace foredraft {

// Where a thread computes: one tile at a time.
template <class Arithmetic>
struct AttentionScratch {
  Attended chunk, all;
  Arithmetic arithmetic;

  static int64_t size(int64_t M, int64_t D) {
    return 2 * Attended::size(M, D) + Arithmetic::size(M, D);
  }

  AttentionScratch(float* memory, int64_t M, int64_t D)
      : chunk(Attended::in(memory, M, D)),
        all(Attended::in(memory + Attended::size(M, D), M, D)),
        arithmetic(memory + 2 * Attended::size(M, D), M, D) {}
};

// Some tokens of a row at the query heads that share a key-value head.
template <class Number, class Arithmetic>
struct AttentionTile {
  Entries<const Number> keys, values;
  int64_t D, group;        // G
  const Visible* visible;  // [T]
  int64_t num_tokens;      // T
  const Arithmetic& arithmetic;  // with queries; the G heads of a token are neighbours
  float cap = 0;           // of scores: see to_weights

  int64_t num_queries() const { return num_tokens * group; }

  // Whether a token has ranks in the chunk that begins here.
  bool reaches(int64_t token, int64_t begin) const {
    return visible[token].count() > begin && visible[token].first < begin + kChunk;
  }

  // What all queries attended in the ranks [begin, begin + kChunk). Meanwhile what is next is fetched.
  void attend_chunk(int64_t begin, Ahead<Number> next, const Attended& out) const {
    const Extents here = extents(begin);
    next.share_out(arithmetic.num_pauses(here.longest, here.shared));
    const auto between = [&]() INLINE { next.pull(); };
    arithmetic.score(keys, {begin, begin + here.longest}, 0, between);
    score_extras(begin);
    for (int64_t t = 0; t < num_tokens; ++t)
      if (reaches(t, begin))
        for (int64_t m = t * group; m < (t + 1) * group; ++m) {
          arithmetic.weights_of(m, ranks_within(t, begin), here.shared, cap, out);
          between();
        }
    if constexpr (kIsScaled<Number>) multiply_weights(begin, here.longest);
    const Range shared{begin, begin + here.shared};
    arithmetic.clear(out);
    if constexpr (Arithmetic::kHasWindows)
      for (int64_t t = 0; here.first && t < num_tokens; ++t) weigh_rest(t, begin, 0, here.first, out);
    const int64_t done =
        arithmetic.weigh_shared(values, shared, here.first, here.common, out, between);
    if (done == here.end) return;
    arithmetic.part(group);
    for (int64_t t = 0; t < num_tokens; ++t) weigh_rest(t, begin, done, kChunk, out);
    arithmetic.whole();
  }

 private:
  static constexpr int64_t kScored = Arithmetic::kScored;

  // How far things go in a chunk, counted from its beginning.
  struct Extents {
    int64_t first;    // ranks before are not seen by all tokens: they are outside of windows
    int64_t common;   // all tokens see the ranks from there to here, as the same entries
    int64_t shared;   // ranks that are the same entries for all who see them
    int64_t longest;  // prefix
    int64_t end;      // of what anybody sees
  };

  Extents extents(int64_t begin) const {
    const auto within = [&](int64_t rank) {
      return std::min(std::max<int64_t>(rank - begin, 0), kChunk);
    };
    Extents all{0, kChunk, kChunk, 0, 0};
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t prefix = within(visible[t].prefix), end = within(visible[t].count());
      all.first = std::max(all.first, within(visible[t].first));
      all.common = std::min(all.common, prefix);
      if (end > prefix) all.shared = std::min(all.shared, prefix);
      all.longest = std::max(all.longest, prefix);
      all.end = std::max(all.end, end);
    }
    // What is added together is shared as a whole.
    all.shared = std::min(all.shared, all.longest);
    if (all.shared < all.end) all.shared = all.shared / Arithmetic::kWeighed * Arithmetic::kWeighed;
    all.common = std::min(all.common, all.shared);
    all.first = std::min(all.first, all.common);
    return all;
  }

  // A token's ranks in the chunk, counted from its beginning.
  Range ranks_within(int64_t token, int64_t begin) const {
    const Visible& sees = visible[token];
    return {std::max<int64_t>(sees.first - begin, 0), std::min(sees.count() - begin, kChunk)};
  }

  // Scores of the extras among the chunk's ranks go where their ranks are.
  void score_extras(int64_t begin) const {
    int64_t first = INT64_MAX, last = -1;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const Range mine = visible[t].extras_within(begin, begin + kChunk);
      if (mine.begin == mine.end) continue;
      first = std::min<int64_t>(first, visible[t].extras[mine.begin]);
      last = std::max<int64_t>(last, visible[t].extras[mine.end - 1]);
    }
    if (last < 0) return;
    for (int64_t entry = first / kScored * kScored; entry <= last; entry += kScored) {
      arithmetic.score(keys, {entry, std::min(entry + kScored, last + 1)}, kChunk, [] {});
      for (int64_t t = 0; t < num_tokens; ++t) order_by_rank(t, begin, entry);
    }
  }

  // Moves those scores of a token's extras that were just computed.
  void order_by_rank(int64_t token, int64_t begin, int64_t entry) const {
    const Visible& sees = visible[token];
    const Range mine = sees.extras_within(begin, begin + kChunk);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t column = sees.extras[i] - entry;
      if (column < 0 || column >= kScored) continue;
      for (int64_t m = token * group; m < (token + 1) * group; ++m) {
        float* scores = arithmetic.scores + m * kScoreStride;
        scores[sees.prefix + i - begin] = scores[kChunk + column];
      }
    }
  }

  // Weights of the chunk have the scales of their values. The chunk's prefixes end at `longest`.
  void multiply_weights(int64_t begin, int64_t longest) const {
    float scales[kChunk];
    put_scales(values, {begin, begin + longest}, scales);
    for (int64_t t = 0; t < num_tokens; ++t) {
      const Range mine = ranks_within(t, begin);
      const Visible& sees = visible[t];
      const int64_t prefix = std::min(std::max(sees.prefix - begin, mine.begin), mine.end);
      for (int64_t m = t * group; m < (t + 1) * group; ++m) {
        float* const weights = arithmetic.scores + m * kScoreStride;
        for (int64_t i = mine.begin; i < prefix; ++i) weights[i] *= scales[i];
        for (int64_t i = prefix; i < mine.end; ++i)
          weights[i] *= scale_of(values.at(sees.extras[begin + i - sees.prefix]));
      }
    }
  }

  // What a token sees in the chunk behind the ranks that are done, and before `stop`.
  void weigh_rest(int64_t token, int64_t begin, int64_t done, int64_t stop,
                  const Attended& out) const {
    const Visible& sees = visible[token];
    const Range mine = ranks_within(token, begin);
    const int64_t end = std::min(mine.end, stop);
    done = std::max(done, mine.begin);
    if (done >= end) return;
    const auto value = [&](int64_t column) {
      const int64_t rank = begin + column;
      return values.at(rank < sees.prefix ? rank : sees.extras[rank - sees.prefix]);
    };
    arithmetic.weigh_rest(value, {done, end}, {token * group, (token + 1) * group}, out);
  }
};

}  // namespace foredraft
