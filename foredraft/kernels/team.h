// A team of threads that walks through the phases of one forward together.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace foredraft {

struct Range {
  int64_t begin, end;
};

// A barrier for phases of microseconds: it spins, and gives the core away only when the others are
// late, that is when there are fewer cores than threads.
//
// In round r each thread tells the one 2^r places on that it has come, and with it all that it has
// heard of. A thread waits for nothing but a word written by one other, so with two threads the
// slower one is known after a single transfer between cores, which may take a microsecond.
class Barrier {
 public:
  explicit Barrier(int64_t most_threads) : told_(size_t(most_threads)) {}

  // `count` is how often this thread has come before.
  void wait(int index, int team_size, uint32_t count) {
    for (int round = 0, step = 1; step < team_size; ++round, step *= 2) {
      const int next = index + step;
      told_[next < team_size ? next : next - team_size].rounds[round].store(
          count + 1, std::memory_order_release);
      const std::atomic<uint32_t>& heard = told_[index].rounds[round];
      for (int spins = 0; heard.load(std::memory_order_acquire) == count; ++spins) {
        if (spins < kSpins) relax();
        else sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;

  struct alignas(128) Told {
    std::atomic<uint32_t> rounds[16] = {};
  };

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  std::vector<Told> told_;
};

// One thread's place in the team.
struct Member {
  Barrier& barrier;
  int index, size;
  uint32_t num_syncs = 0;

  void sync() { barrier.wait(index, size, num_syncs++); }

  // This thread's contiguous share of `count` things handed out in whole blocks.
  Range share(int64_t count, int64_t block = 1) const {
    const int64_t blocks = (count + block - 1) / block;
    return {std::min(count, blocks * index / size * block),
            std::min(count, blocks * (index + 1) / size * block)};
  }
};

// What the time of a forward is reported by.
enum Phase { kLinear, kAttention, kHead, kOther, kNumPhases };

// Seconds of each phase, waiting at the barrier behind it included. The clock is read seven times a
// layer, which takes a few microseconds a forward.
class PhaseClock {
 public:
  explicit PhaseClock(double* seconds) : seconds_(seconds) {
    if (seconds) std::fill(seconds, seconds + kNumPhases, 0.0);
  }

  // What passed since the phase before ended belongs to this one.
  void end(Phase phase) {
    if (!seconds_) return;
    const Clock::time_point now = Clock::now();
    seconds_[phase] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;

  double* seconds_;
  Clock::time_point last_ = Clock::now();
};

}  // namespace foredraft
