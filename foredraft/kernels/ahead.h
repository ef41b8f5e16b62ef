// Entries that are read next, fetched while something is computed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "entries.h"
#include "simd.h"
#include "team.h"

namespace foredraft {

// Keys and values are pulled into the second cache a few lines at a time: all at once they would take
// every buffer for misses, and hold up what is computed. They come in turn, as memory gives two streams
// faster than one.
template <class Number>
class Ahead {
 public:
  // At most three pieces, one after the other.
  void add(const Entries<const Number>& keys, const Entries<const Number>& values, Range entries) {
    const int64_t count = entries.end - entries.begin;
    if (count <= 0) return;
    run_lines_ = ceil_div(kRunEntries * keys.stride * int64_t(sizeof(Number)), kLine);
    num_runs_ += ceil_div(count, kRunEntries);
    pieces_[num_pieces_++] = {keys, values, entries};
  }

  // So many calls of pull() are to fetch all of it.
  void share_out(int64_t calls) {
    lines_a_call_ = calls ? ceil_div(num_runs_ * run_lines_, calls) : 0;
  }

  // Inlined: a function that does nothing but prefetch counts as one that does nothing.
  INLINE void pull() {
    for (int64_t i = 0; i < lines_a_call_; ++i) {
      if (key_ == end_ && !next_run()) return;
      __builtin_prefetch(key_, 0, kToL2);
      __builtin_prefetch(value_, 0, kToL2);
      key_ += kLine, value_ += kLine;
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  struct Piece {
    Entries<const Number> keys, values;
    Range entries;
  };

  Piece pieces_[3];
  int num_pieces_ = 0, piece_ = 0;
  int64_t run_lines_ = 0, num_runs_ = 0, lines_a_call_ = 0;
  const char *key_ = nullptr, *value_ = nullptr, *end_ = nullptr;  // of the run at hand

  bool next_run() {
    while (piece_ < num_pieces_ && pieces_[piece_].entries.begin >= pieces_[piece_].entries.end)
      ++piece_;
    if (piece_ == num_pieces_) {
      lines_a_call_ = 0;
      return false;
    }
    Piece& here = pieces_[piece_];
    key_ = reinterpret_cast<const char*>(here.keys.at(here.entries.begin));
    value_ = reinterpret_cast<const char*>(here.values.at(here.entries.begin));
    end_ = key_ + run_lines_ * kLine;
    here.entries.begin += kRunEntries;
    return true;
  }
};

}  // namespace foredraft
