// The attention phase of a layer: a thread's pieces of it, and what threads fold together.
//
// Shape legend: see worker.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "entries.h"
#include "interface.h"
#include "products.h"
#include "rows.h"
#include "simd.h"
#include "team.h"
#include "workspace.h"

namespace foredraft {

// The keys or values of a layer; Type is their number, const or not.
template <class Type>
inline CacheLayer<Type> cache_layer(const ForedraftForward& forward, const ForedraftLayer& layer,
                                    int64_t D, bool are_keys) {
  const ForedraftStore& store = forward.stores[layer.kind];
  return {static_cast<Type*>(are_keys ? store.keys : store.values) + layer.number * store.layer_stride,
          store.block_stride, store.head_stride, D, __builtin_ctzll(uint64_t(forward.block_entries))};
}

// From rotated keys and raw queries to attended rows in lane order. `Number` is the type of entries.
template <class Weight, class Form, class Number>
class AttentionPhase {
 public:
  AttentionPhase(const ForedraftModel& model, const ForedraftForward& forward,
                 const Workspace<Weight, Form>& work, const View& view, Member& me,
                 const ForedraftLayer& layer)
      : model_(model), forward_(forward), work_(work), visible_(view.visible), plan_(view.plan),
        me_(me), layer_(layer) {}

  void run() const {
    const std::vector<AttentionPlan::Piece>& pieces = plan_.pieces(me_.index);
    for (size_t i = 0; i < pieces.size(); ++i)
      attend(pieces[i], i + 1 < pieces.size() ? &pieces[i + 1] : nullptr);
    if (plan_.shared().empty()) return;
    me_.sync();
    for (const AttentionPlan::Tile* tile : plan_.shared()) fold_kept(*tile);
  }

 private:
  using Attention = std::conditional_t<std::is_same_v<Number, Weight>, AttentionOf<Weight, Form>,
                                       FloatAttention<Number>>;

  const ForedraftModel& model_;
  const ForedraftForward& forward_;
  const Workspace<Weight, Form>& work_;
  const std::vector<Visible>& visible_;
  const AttentionPlan& plan_;
  Member& me_;
  const ForedraftLayer& layer_;

  const Heads heads_{model_, layer_.kind};
  const int64_t D = heads_.D, H = heads_.H, G = heads_.G;

  // Finishes the queries of a tile: [tokens, G, padded D].
  void put_queries(Range tokens, int64_t kv_head, const Attention& attention) const {
    float *row = attention.queries, *x = attention.scores;  // room for one
    const float scale =
        model_.query_scale ? kLog2E * float(model_.query_scale) : kLog2E / std::sqrt(float(D));
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      const float* queries = work_.qkv + token * heads_.qkv_rows;
      const HeadNorm norm(model_, D, model_.latent.rank ? nullptr : layer_.query_norm, queries, H);
      for (int64_t head = kv_head * G; head < (kv_head + 1) * G; ++head, row += padded(D)) {
        const float* const query = queries + head * (heads_.query_rows / H);
        std::copy(query, query + D, x);
        if (!model_.norms_rotated) norm.apply(x, head);
        work_.rotate(model_, layer_, token, x);
        if (model_.norms_rotated) norm.apply(x, head);
        for (int64_t i = 0; i < D; ++i) row[i] = x[i] * scale;
      }
    }
    attention.begin();
  }

  Entries<const Number> keys(const AttentionPlan::Tile& tile) const { return entries(tile, true); }
  Entries<const Number> values(const AttentionPlan::Tile& tile) const { return entries(tile, false); }

  Entries<const Number> entries(const AttentionPlan::Tile& tile, bool are_keys) const {
    return cache_layer<const Number>(forward_, layer_, D, are_keys)
        .entries(forward_.tables[tile.tokens.begin], tile.kv_head);
  }

  // Has the entries of a piece's chunk fetched. Behind a whole one, the rest goes with it.
  void add_chunk(const AttentionPlan::Piece& piece, int64_t chunk, Ahead<Number>& ahead) const {
    const AttentionPlan::Tile& tile = *piece.tile;
    if (chunk < piece.chunks.end)
      ahead.add(keys(tile), values(tile),
                {chunk * kChunk, std::min((chunk + 1) * kChunk, tile.ranks)});
  }

  // What is fetched while a chunk is computed: the next one, and with a piece's last whole one the
  // beginning of the following piece. What is behind that is done too soon to fetch anything. The first
  // one of all is fetched a little ahead of what is computed of it.
  Ahead<Number> ahead_of(const AttentionPlan::Piece& piece, int64_t chunk,
                         const AttentionPlan::Piece* following) const {
    Ahead<Number> ahead;
    if (&piece == plan_.pieces(me_.index).data() && chunk == piece.chunks.begin)
      add_chunk(piece, chunk, ahead);
    add_chunk(piece, chunk + 1, ahead);
    if (following && chunk == last_long_chunk(piece))
      add_chunk(*following, following->chunks.begin, ahead);
    return ahead;
  }

  static int64_t last_long_chunk(const AttentionPlan::Piece& piece) {
    const Range chunks = piece.chunks;
    const bool is_whole = chunks.end * kChunk <= piece.tile->ranks;
    return is_whole || chunks.end - chunks.begin == 1 ? chunks.end - 1 : chunks.end - 2;
  }

  void attend(const AttentionPlan::Piece& piece, const AttentionPlan::Piece* following) const {
    const AttentionPlan::Tile& tile = *piece.tile;
    const Range chunks = piece.chunks;
    const int64_t T = tile.tokens.end - tile.tokens.begin, M = T * G;
    const AttentionScratch<Attention> scratch(work_.attention + me_.index * work_.attention_size,
                                              M, D);
    put_queries(tile.tokens, tile.kv_head, scratch.arithmetic);
    const AttentionTile<Number, Attention> attention{
        keys(tile), values(tile), D, G,
        &visible_[size_t(tile.tokens.begin)], T, scratch.arithmetic,
        float(model_.attention_cap) * kLog2E};
    for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
      const bool is_first = chunk == tile.first_chunk;
      attention.attend_chunk(chunk * kChunk, ahead_of(piece, chunk, following),
                             tile.partial >= 0 ? kept(tile, chunk)
                             : is_first        ? scratch.all
                                               : scratch.chunk);
      if (tile.partial >= 0 || is_first) continue;
      for (int64_t m = 0; m < M; ++m)
        if (attention.reaches(m / G, chunk * kChunk))
          add(seen_by(tile, m), chunk, scratch.all, scratch.chunk, m);
    }
    if (tile.partial < 0)
      for (int64_t m = 0; m < M; ++m) put_attended(tile, m, scratch.all);
  }

  // By the token of query m.
  const Visible& seen_by(const AttentionPlan::Tile& tile, int64_t m) const {
    return visible_[size_t(tile.tokens.begin + m / G)];
  }

  // Adds what query m attended in a chunk that is not the tile's first; it may be the query's.
  void add(const Visible& sees, int64_t chunk, const Attended& all, const Attended& next,
           int64_t m) const {
    if (sees.begins_in(chunk * kChunk)) begin_with(all, next, m, D);
    else fold(all, next, m, D);
  }

  // What a chunk of a shared tile gave.
  Attended kept(const AttentionPlan::Tile& tile, int64_t chunk) const {
    const int64_t M = (tile.tokens.end - tile.tokens.begin) * G;
    const int64_t number = tile.partial + chunk - tile.first_chunk;
    return Attended::in(work_.kept_chunks + number * work_.kept_chunk_size, M, D);
  }

  // Folds this thread's share of a shared tile's queries.
  void fold_kept(const AttentionPlan::Tile& tile) const {
    const Range mine = me_.share((tile.tokens.end - tile.tokens.begin) * G);
    const Attended all = kept(tile, tile.first_chunk);
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      const Visible& sees = seen_by(tile, m);
      const int64_t first = std::max(sees.first / kChunk, tile.first_chunk + 1);
      for (int64_t chunk = first; chunk * kChunk < sees.count(); ++chunk)
        add(sees, chunk, all, kept(tile, chunk), m);
      put_attended(tile, m, all);
    }
  }

  // Normalises what query m of a tile attended. Both sides are in one lane order, where heads are
  // whole pairs and entries of the type that weights have.
  void put_attended(const AttentionPlan::Tile& tile, int64_t m, const Attended& all) const {
    if (model_.latent.rank) return put_latent(tile, m, all);
    float* out = work_.attended + (tile.tokens.begin + m / G) * padded(H * D);
    const int64_t offset = (tile.kv_head * G + m % G) * D;
    const float* values = all.values + m * attended_width(D);
    const float factor = factor_of(tile.kv_head * G + m % G, all.most[m], all.sum[m]);
    if (std::is_same_v<Number, Weight> && offset % kPair == 0 && D % kPair == 0) {
      for (int64_t d = 0; d < D; ++d) out[offset + d] = values[d] * factor;
    } else {
      for (int64_t d = 0; d < D; ++d)
        out[lane_order<Weight>(offset + d)] = values[lane_order<Number>(d)] * factor;
    }
    if (model_.gates_attention) gate(tile.tokens.begin + m / G, tile.kv_head * G + m % G, out);
  }

  // The same of a latent, which lies behind what turns: it is then multiplied by head.
  void put_latent(const AttentionPlan::Tile& tile, int64_t m, const Attended& all) const {
    const int64_t C = model_.latent.rank, head = tile.kv_head * G + m % G;
    float* out = work_.of_heads + (head * forward_.num_tokens + tile.tokens.begin + m / G) * padded(C);
    const float* values = all.values + m * attended_width(D);
    const float factor = factor_of(head, all.most[m], all.sum[m]);
    for (int64_t i = 0; i < C; ++i)
      out[lane_order<typename Form::Order>(i)] = values[lane_order<Number>(D - C + i)] * factor;
  }

  // A head's sink is a score without a value.
  float factor_of(int64_t head, float most, float sum) const {
    if (!layer_.sinks) return 1.0f / sum;
    const float sink = layer_.sinks[head] * kLog2E, top = std::max(most, sink);
    const float own = std::exp2(most - top);
    return own / (sum * own + std::exp2(sink - top));
  }

  // Multiplies what a head attended with the sigmoid of its gates.
  void gate(int64_t token, int64_t head, float* out) const {
    const float* const gates = work_.qkv + token * heads_.qkv_rows + head * 2 * D + D;
    for (int64_t d = 0; d < D; ++d)
      out[lane_order<Weight>(head * D + d)] *= 1.0f / (1.0f + std::exp(-gates[d]));
  }
};

}  // namespace foredraft
