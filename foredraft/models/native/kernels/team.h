// A team of threads that walks through the phases of one forward together.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace foredraft {

struct Range {
  int64_t begin, end;
};

// A barrier for phases of microseconds: it spins, and gives the core away only when the others are
// late, that is when there are fewer cores than threads.
class Barrier {
 public:
  void wait(int team_size) {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_size) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) relax();
      else sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// One thread's place in the team.
struct Member {
  Barrier& barrier;
  int index, size;

  void sync() const {
    if (size > 1) barrier.wait(size);
  }

  // This thread's contiguous share of `count` things handed out in whole blocks.
  Range share(int64_t count, int64_t block = 1) const {
    const int64_t blocks = (count + block - 1) / block;
    return {std::min(count, blocks * index / size * block),
            std::min(count, blocks * (index + 1) / size * block)};
  }
};

}  // namespace foredraft
