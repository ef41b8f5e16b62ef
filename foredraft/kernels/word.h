// A word that one thread writes and another waits for: a brief spin, and then sleep.
//
// Phases of a forward take some ten microseconds, so the thread waited for usually is about to come:
// asking the system to sleep and to be woken would take longer. But where a neighbour has taken its core, it
// comes milliseconds later, and a thread that spins until then takes the machine from everybody,
// from the late thread too.
//
// Beside a neighbour the system may wake both on one core, and leaves them there: each would spin in
// the other's way at every phase. So whoever spins where the other wrote last goes to another core.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foredraft {

// Longer than threads of a team are apart where each has a core, also when another thread takes one for
// a moment, as a server's does with each event: where a core of a virtual machine has fallen asleep,
// waking it takes longer than that moment. Far shorter than a core is lent.
constexpr std::chrono::microseconds kSpinTime{500};
// Longer than phases of threads with a core each end apart.
constexpr std::chrono::microseconds kLate{50};

class Word {
 public:
  // For the one thread that writes.
  void tell(uint32_t value) {
    core_.store(this_core(), std::memory_order_relaxed);
    value_.store(value);
    if (sleeps_.load()) wake();  // both in one order with await(): it sees the value or we see it
  }

  // For the one thread that waits: until the word is another than `old`.
  void await(uint32_t old) {
    if (spin(old, kLate)) return;
    if (const int core = core_.load(std::memory_order_relaxed); core == this_core()) leave(core);
    if (spin(old, kSpinTime)) return;
    sleeps_.store(true);
    while (value_.load() == old) sleep(old);
    sleeps_.store(false, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<bool> sleeps_{false};
  std::atomic<int> core_{-1};  // of the writer

  bool spin(uint32_t old, std::chrono::microseconds most) const {
    using Clock = std::chrono::steady_clock;
    constexpr int kBetweenLooks = 32;  // at the clock
    Clock::time_point stop{};
    for (int spins = 1; value_.load(std::memory_order_acquire) == old; ++spins) {
      relax();
      if (spins % kBetweenLooks) continue;
      const Clock::time_point now = Clock::now();
      if (spins == kBetweenLooks) stop = now + most;
      else if (now > stop) return false;
    }
    return true;
  }

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

#if defined(__linux__)
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the system sees a plain word");

  void sleep(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr); }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1); }

  static int this_core() { return sched_getcpu(); }

  // Go to another core, if there is one; the thread may come back.
  static void leave(int core) {
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all)) return;
    cpu_set_t others = all;
    CPU_CLR(size_t(core), &others);
    if (!sched_setaffinity(0, sizeof others, &others)) sched_setaffinity(0, sizeof all, &all);
  }
#else
  void sleep(uint32_t) { sched_yield(); }
  void wake() {}
  static int this_core() { return 0; }
  static void leave(int) {}
#endif
};

}  // namespace foredraft
