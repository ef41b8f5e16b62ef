// A team of threads that walks through the phases of one forward together.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "word.h"

namespace foredraft {

constexpr int kMostThreads = 1024;

struct Range {
  int64_t begin, end;
};

// A barrier for phases of microseconds.
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
      told_[size_t(next < team_size ? next : next - team_size)].rounds[round].tell(count + 1);
      told_[size_t(index)].rounds[round].await(count);
    }
  }

 private:
  static constexpr int kRounds = 10;
  static_assert(kMostThreads <= 1 << kRounds, "a word for every round");

  struct alignas(128) Told {
    Word rounds[kRounds];
  };

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

// Threads that are kept between forwards: started when first needed, asleep while nothing is to do.
// They end with the process.
class Team {
 public:
  // Calls work(member) in `size` threads, of which the caller is one, and returns when all are done.
  // False if the system gives no more threads; then nothing was called.
  template <class Work>
  bool run(int size, const Work& work) {
    if (!grow(size - 1)) return false;
    Barrier barrier(size);
    std::fenv_t arithmetic;
    std::fegetenv(&arithmetic);
    const Job job{[](const void* what, Member me) { (*static_cast<const Work*>(what))(me); }, &work,
                  &barrier, size, &arithmetic};
    for (int i = 1; i < size; ++i) helpers_[size_t(i - 1)]->begin(&job, i);
    work(Member{barrier, 0, size});
    for (int i = 1; i < size; ++i) helpers_[size_t(i - 1)]->join();
    return true;
  }

 private:
  struct Job {
    void (*call)(const void* work, Member me);
    const void* work;
    Barrier* barrier;
    int size;
    const std::fenv_t* arithmetic;  // the caller's: whether denormals are flushed, how sums are rounded
  };

  class Helper {
   public:
    void begin(const Job* job, int index) {
      job_ = job, index_ = index;
      begun_.tell(++count_);
    }

    void join() { done_.await(count_ - 1); }

    void serve() {
      for (uint32_t count = 0;; ++count) {
        begun_.await(count);
        std::fesetenv(job_->arithmetic);
        job_->call(job_->work, Member{*job_->barrier, index_, job_->size});
        done_.tell(count + 1);
      }
    }

   private:
    alignas(128) Word begun_;
    const Job* job_ = nullptr;
    int index_ = 0;
    uint32_t count_ = 0;
    alignas(128) Word done_;
  };

  std::vector<std::unique_ptr<Helper>> helpers_;

  // Signals are for the threads that the program knows of, so helpers start with all of them blocked.
  bool grow(int count) {
    if (int(helpers_.size()) >= count) return true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (int(helpers_.size()) < count) {
        auto helper = std::make_unique<Helper>();
        helpers_.reserve(helpers_.size() + 1);
        std::thread([it = helper.get()] { it->serve(); }).detach();
        helpers_.push_back(std::move(helper));
      }
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return int(helpers_.size()) >= count;
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
