// Who attends to what: the same for all layers of a forward.
//
// Some tokens of a row and one key-value head are a tile; its ranks come in chunks (attention.h).
// Chunks are dealt out in order, as even as they come by the queries and entries in them. A tile
// whose chunks went to several threads is shared: they keep what each chunk gave, and fold it when
// all are done.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "team.h"

namespace foredraft {

constexpr int64_t kTileTokens = 16;
constexpr int64_t kTilesPerThread = 8;  // from so many on whole tiles are even enough

inline int64_t num_chunks(int64_t ranks) { return (ranks + kChunk - 1) / kChunk; }

// What tokens see, from what Python handed over: the last `window` entries, or all if 0.
inline std::vector<Visible> visible_entries(const ForedraftForward& forward, int64_t window) {
  std::vector<Visible> visible(static_cast<size_t>(forward.num_tokens));
  for (int64_t t = 0; t < forward.num_tokens; ++t) {
    const int32_t start = forward.extra_starts[t];
    visible[size_t(t)] = Visible::of(forward.prefixes[t], forward.extras + start,
                                     forward.extra_starts[t + 1] - start, window);
  }
  return visible;
}

class AttentionPlan {
 public:
  struct Tile {
    Range tokens;
    int64_t kv_head, ranks;
    int64_t first_chunk;   // that anybody sees
    int64_t partial = -1;  // if shared: number of its first chunk among those kept

    Range chunks() const { return {first_chunk, num_chunks(ranks)}; }
  };

  struct Piece {
    const Tile* tile;
    Range chunks;
  };

  AttentionPlan(int64_t num_kv_heads, const ForedraftForward& forward,
                const std::vector<Visible>& visible)
      : pieces_(size_t(forward.num_threads)) {
    // Tiles get smaller until each thread has two pieces of work. Those of one chunk are better cut in as
    // few places as there must be: each part reads the same entries.
    for (int64_t step = kTileTokens; step >= 1; step /= 2) {
      tiles_.clear();
      for (int64_t r = 0; r < forward.num_rows; ++r)
        add_tiles(forward.rows[r], step, num_kv_heads, visible);
      int64_t pieces = 0;
      for (const Tile& tile : tiles_) pieces += long_chunks(tile);
      if (pieces >= 2 * forward.num_threads) break;
      if (pieces > int64_t(tiles_.size())) continue;
      cut_where_shares_end(forward.num_threads, visible);
      break;
    }
    deal_out(forward.num_threads);
    for (const auto& mine : pieces_)
      for (const Piece& piece : mine)
        if (piece.chunks.begin > piece.tile->first_chunk) share(tiles_[size_t(piece.tile - tiles_.data())]);
  }

  const std::vector<Piece>& pieces(int thread) const { return pieces_[size_t(thread)]; }
  const std::vector<const Tile*>& shared() const { return shared_; }

  // Chunks that a forward keeps at most.
  static int64_t most_kept(int64_t tokens, int64_t kv_heads, int64_t entries, int64_t threads) {
    return std::min(threads - 1, tokens * kv_heads) * num_chunks(entries);
  }

 private:
  std::vector<Tile> tiles_;
  std::vector<std::vector<Piece>> pieces_;  // by thread
  std::vector<const Tile*> shared_;
  int64_t num_kept_ = 0;

  void add_tiles(const ForedraftRow& row, int64_t step, int64_t kv_heads,
                 const std::vector<Visible>& visible) {
    for (int64_t t = row.first_token; t < row.end_token; t += step)
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
        add_tile({t, std::min(t + step, row.end_token)}, kv_head, visible);
  }

  void add_tile(Range tokens, int64_t kv_head, const std::vector<Visible>& visible) {
    int64_t ranks = 0, first = INT64_MAX;
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      ranks = std::max(ranks, visible[size_t(token)].count());
      first = std::min(first, visible[size_t(token)].first);
    }
    tiles_.push_back({tokens, kv_head, ranks, first / kChunk});
  }

  // Between those tokens where a thread's even share of all work ends.
  void cut_where_shares_end(int64_t threads, const std::vector<Visible>& visible) {
    const std::vector<Tile> whole = std::move(tiles_);
    tiles_.clear();
    int64_t total = 0, before = 0;
    for (const Tile& tile : whole) total += work(tile, tile.chunks());
    for (const Tile& tile : whole) {
      const int64_t here = work(tile, tile.chunks());
      const int64_t a_token = std::max<int64_t>(here / (tile.tokens.end - tile.tokens.begin), 1);
      int64_t first = tile.tokens.begin;
      for (int64_t thread = 1; thread < threads; ++thread) {
        const int64_t there = total * thread / threads - before;
        const int64_t token = tile.tokens.begin + (there + a_token / 2) / a_token;
        if (token <= first || token >= tile.tokens.end) continue;
        add_tile({first, token}, tile.kv_head, visible);
        first = token;
      }
      add_tile({first, tile.tokens.end}, tile.kv_head, visible);
      before += here;
    }
  }

  // Whole chunks of a tile: what is behind them goes with the last.
  static int64_t long_chunks(const Tile& tile) {
    return std::max<int64_t>(tile.ranks / kChunk - tile.first_chunk, 1);
  }

  // Chunks, or whole tiles if there are many, go to the thread in whose share of all work their
  // middle lies. What is behind the last whole chunk goes with it: it is not worth a barrier.
  void deal_out(int64_t threads) {
    const bool whole = int64_t(tiles_.size()) >= kTilesPerThread * threads;
    int64_t total = 0, before = 0;
    for (const Tile& tile : tiles_) total += work(tile, tile.chunks());
    for (const Tile& tile : tiles_) {
      const int64_t first = tile.first_chunk, count = num_chunks(tile.ranks);
      const int64_t last = first + long_chunks(tile) - 1;
      for (Range chunks{first, first}; chunks.begin < count; chunks.begin = chunks.end) {
        chunks.end = whole || chunks.begin == last ? count : chunks.begin + 1;
        const int64_t here = work(tile, chunks);
        give((before + here / 2) * threads / std::max<int64_t>(total, 1), tile, chunks);
        before += here;
      }
    }
  }

  static int64_t work(const Tile& tile, Range chunks) {
    const int64_t ranks = std::min(chunks.end * kChunk, tile.ranks) - chunks.begin * kChunk;
    return (tile.tokens.end - tile.tokens.begin) * ranks;
  }

  void give(int64_t thread, const Tile& tile, Range chunks) {
    std::vector<Piece>& mine = pieces_[size_t(thread)];
    if (!mine.empty() && mine.back().tile == &tile) mine.back().chunks.end = chunks.end;
    else mine.push_back({&tile, chunks});
  }

  void share(Tile& tile) {
    if (tile.partial >= 0) return;
    tile.partial = num_kept_;
    num_kept_ += num_chunks(tile.ranks) - tile.first_chunk;
    shared_.push_back(&tile);
  }
};

// What the layers of one kind attend to.
struct View {
  std::vector<Visible> visible;
  AttentionPlan plan;

  View(int64_t num_kv_heads, const ForedraftForward& forward, int64_t window)
      : visible(visible_entries(forward, window)), plan(num_kv_heads, forward, visible) {}
};

inline std::vector<View> views_of(const ForedraftModel& model, const ForedraftForward& forward) {
  std::vector<View> views;
  views.reserve(size_t(model.num_views));
  for (int64_t i = 0; i < model.num_views; ++i)
    views.emplace_back(model.heads[model.view_kinds[i]].num_kv_heads, forward, model.windows[i]);
  return views;
}

}  // namespace foredraft
