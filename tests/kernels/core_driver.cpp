// Waits for a word on a made-up machine of two cores, and prints the cores that the waiting thread may
// be on after each change: "1 01" is core 1 alone, then both again.
// First beside a writer that was last on the waiting thread's core, then beside one on the other.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "word.h"

namespace {

std::atomic<int> here{0};

void wait_for_a_word_told_on(int core) {
  foredraft::Word word;
  here = core;
  word.tell(1);
  here = 0;
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    word.tell(2);
  });
  word.await(1);
  writer.join();
  std::puts("");
}

}  // namespace

extern "C" int sched_getcpu() noexcept { return here; }

extern "C" int sched_getaffinity(pid_t, size_t, cpu_set_t* cores) noexcept {
  CPU_ZERO(cores);
  CPU_SET(0, cores);
  CPU_SET(1, cores);
  return 0;
}

extern "C" int sched_setaffinity(pid_t, size_t, const cpu_set_t* cores) noexcept {
  for (int core = 0; core < 2; ++core)
    if (CPU_ISSET(core, cores)) std::printf("%d", core);
  std::printf(" ");
  return 0;
}

int main() {
  wait_for_a_word_told_on(0);
  wait_for_a_word_told_on(1);
}
