// Who may run a forward, and when: one at a time in a process, in threads that this process has.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "team.h"

namespace foredraft {

// What a forward returns; mirrored in fused.py.
enum Outcome : int64_t { kDone, kReentered, kNoThreads };

// The threads of this process and what they are busy with. After fork() the child has none of its
// parent's threads, and locks may be held by threads that it does not have: it begins anew.
class Entry {
 public:
  static Entry& of_this_process() {
    static std::atomic<Entry*> current{nullptr};
    Entry* known = current.load();
    if (known && known->process_ == getpid()) return *known;
    Entry* const fresh = new Entry;  // never freed: helpers use it until the process ends
    if (current.compare_exchange_strong(known, fresh)) return *fresh;
    delete fresh;  // another thread was faster
    return *known;
  }

  // Runs `work` in a team. Forwards of different memory wait for each other; two in the same memory
  // would overwrite each other's numbers, so the second is refused.
  template <class Work>
  Outcome run(const void* memory, int64_t num_threads, const Work& work) {
    if (!claim(memory)) return kReentered;
    bool done;
    {
      const std::lock_guard<std::mutex> turn(team_lock_);
      done = team_.run(int(num_threads), work);
    }
    release(memory);
    return done ? kDone : kNoThreads;
  }

 private:
  const pid_t process_ = getpid();
  std::mutex claims_lock_, team_lock_;
  std::vector<const void*> claims_;
  Team team_;

  bool claim(const void* memory) {
    const std::lock_guard<std::mutex> lock(claims_lock_);
    if (std::find(claims_.begin(), claims_.end(), memory) != claims_.end()) return false;
    claims_.push_back(memory);
    return true;
  }

  void release(const void* memory) {
    const std::lock_guard<std::mutex> lock(claims_lock_);
    claims_.erase(std::find(claims_.begin(), claims_.end(), memory));
  }
};

}  // namespace foredraft
