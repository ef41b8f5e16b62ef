// Which tokens of a forward have chosen which expert.
//
// Shape legend: T tokens, X experts, K of them that a token chooses.
#pragma once

#include <cstdint>
#include <vector>

namespace foredraft {

// The pairs of a token and one of its experts, sorted by experts. Pair p is choice p % K of token
// p / K.
class Chosen {
 public:
  // `experts` are int32 [T, K].
  Chosen(const void* experts, int64_t T, int64_t X, int64_t K)
      : starts_(size_t(X + 1)), pairs_(size_t(T * K)) {
    const int32_t* const expert = static_cast<const int32_t*>(experts);
    for (int64_t p = 0; p < T * K; ++p) ++starts_[size_t(expert[p]) + 1];
    for (size_t x = 0; x < size_t(X); ++x) starts_[x + 1] += starts_[x];
    std::vector<int64_t> next(starts_.begin(), starts_.end() - 1);
    for (int64_t p = 0; p < T * K; ++p)
      pairs_[size_t(next[size_t(expert[p])]++)] = static_cast<int32_t>(p);
  }

  // Calls work(expert, its pairs, how many pairs of other experts come before, how many it has) for each
  // expert that somebody has chosen.
  template <class Work>
  void each(const Work& work) const {
    for (size_t x = 0; x + 1 < starts_.size(); ++x) {
      const int64_t first = starts_[x], count = starts_[x + 1] - first;
      if (count) work(int64_t(x), pairs_.data() + first, first, count);
    }
  }

 private:
  std::vector<int64_t> starts_;
  std::vector<int32_t> pairs_;
};

}  // namespace foredraft
