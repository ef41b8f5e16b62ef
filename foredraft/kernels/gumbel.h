// Keyed Gumbel noise: random bits of a token, the noise they are, how large it can be at most, and
// the best tokens with it. core/noise.py says what the noise is; noise.cpp why no bit can change.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

static_assert(FLT_EVAL_METHOD == 0, "doubles are rounded after every operation");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bytes of words are read in memory");

// Kept out of its callers: inlined there, GCC 12 does not turn the loops into vectors.
#define SEPARATE __attribute__((noinline))

namespace foredraft {
namespace noise {

constexpr int kLanes = 16;            // philox blocks computed side by side
constexpr int kGroup = 16 * kLanes;   // tokens that they give the coarse bits of
constexpr int kColumns = kGroup / 4;  // tokens of a group that share a word of those blocks
constexpr double kNever = -std::numeric_limits<double>::infinity();

// ---- random bits --------------------------------------------------------------------------------

constexpr uint32_t kTarget = 0;  // Purpose.TARGET

struct Key {
  uint64_t seed, position;
};

struct Words {
  uint32_t w0, w1, w2, w3;
};

// philox4x32-10 of one index.
inline Words philox(Key key, uint32_t index) {
  uint32_t c0 = uint32_t(key.position), c1 = uint32_t(key.position >> 32), c2 = kTarget, c3 = index;
  uint32_t k0 = uint32_t(key.seed), k1 = uint32_t(key.seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
  }
  return {c0, c1, c2, c3};
}

// The same of kLanes indices from `first` on: words [4, kLanes].
inline SEPARATE void philox(Key key, uint32_t first, uint32_t* __restrict words) {
#pragma GCC unroll 1
  for (int i = 0; i < kLanes; ++i) {
    const Words one = philox(key, first + uint32_t(i));
    words[i] = one.w0, words[kLanes + i] = one.w1;
    words[2 * kLanes + i] = one.w2, words[3 * kLanes + i] = one.w3;
  }
}

// ---- the noise ----------------------------------------------------------------------------------

// log x for normal x > 0, within 1 ulp: x = 2^k m with m in [sqrt(1/2), sqrt(2)), f = m - 1,
// s = f / (2 + f), and log m = 2 atanh s = f - (f f / 2 - s (f f / 2 + R)) with
// R = 2 s^2 / 3 + 2 s^4 / 5 + ...; the terms left out are below 2^-60 of the first.
inline double natural_log(double x) {
  constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCD;
  constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int64_t exponent = int64_t(bits - kSqrtHalf) >> 52;
  bits -= uint64_t(exponent) << 52;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  const double k = double(exponent), f = m - 1.0, s = f / (2.0 + f), z = s * s;
  double r = 2.0 / 21;
  for (int odd = 19; odd >= 3; odd -= 2) r = r * z + 2.0 / odd;
  r = r * z;
  const double half = 0.5 * f * f;
  return k * kLn2High - ((half - (s * (half + r) + k * kLn2Low)) - f);
}

// -log(-log(1 - w)) for w = (2 r + 1) / 2^53.
inline double gumbel(uint64_t r) {
  const double w = double(int64_t(2 * r + 1)) * 0x1p-53;
  return -natural_log(-natural_log(1.0 - w));
}

// No noise with this coarse byte is larger: -log(1 - w) > w >= coarse / 256. The margin is far above
// what the rounding of both sides can come to.
struct Bounds {
  double of[256];
  Bounds() {
    of[0] = gumbel(0) + 1e-9;
    for (int coarse = 1; coarse < 256; ++coarse) of[coarse] = -natural_log(coarse / 256.0) + 1e-9;
  }
};
const Bounds kBounds;

// The same of all bits, without a logarithm: with z leading zeros in 2 r + 1, w >= 2^(10 - z).
inline double close_bound(uint64_t r) {
  constexpr double kLn2 = 0.693147180559945309;
  return (__builtin_clzll(2 * r + 1) - 10) * kLn2 + 1e-9;
}

inline uint64_t random_52(Key key, uint32_t token, uint8_t coarse) {
  const Words fine = philox(key, 0x80000000u | token);
  return uint64_t(coarse) << 44 | uint64_t(fine.w0) << 12 | fine.w1 >> 20;
}

inline uint8_t coarse_byte(Key key, uint32_t token) {
  const Words block = philox(key, (token >> 8) * kLanes + (token >> 2 & 15));
  const uint32_t words[] = {block.w0, block.w1, block.w2, block.w3};
  return uint8_t(words[token >> 6 & 3] >> 8 * (token & 3));
}

// ---- the best tokens ----------------------------------------------------------------------------

// The best tokens so far, best first; of equal scores the smaller token.
class Best {
 public:
  Best(int64_t wanted, int64_t* tokens, double* scores)
      : wanted_(wanted), tokens_(tokens), scores_(scores) {}

  // A token below this score is not wanted.
  double floor() const { return found_ < wanted_ ? kNever : scores_[wanted_ - 1]; }
  int64_t found() const { return found_; }

  void offer(int64_t token, double score) {
    const auto beats = [&](int64_t i) {
      return score > scores_[i] || (score == scores_[i] && token < tokens_[i]);
    };
    if (score == kNever || (found_ == wanted_ && !beats(wanted_ - 1))) return;
    int64_t place = found_ < wanted_ ? found_++ : wanted_ - 1;
    for (; place > 0 && beats(place - 1); --place)
      tokens_[place] = tokens_[place - 1], scores_[place] = scores_[place - 1];
    tokens_[place] = token, scores_[place] = score;
  }

 private:
  const int64_t wanted_;
  int64_t found_ = 0;
  int64_t* const tokens_;
  double* const scores_;
};

}  // namespace noise
}  // namespace foredraft
