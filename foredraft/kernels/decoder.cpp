// The decoder as a library: what fused.py calls. worker.h says what a forward does.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("ira-algorithm=priority")  // spills fewer of dot_block's running sums
#endif

#include <vector>

#include "attention_plan.h"
#include "entry.h"
#include "interface.h"
#include "pages.h"
#include "products.h"
#include "worker.h"
#include "workspace.h"

using namespace foredraft;

namespace {

template <class Weight, class Form>
Outcome run(const ForedraftModel& model, const ForedraftForward& forward) {
  const Workspace<Weight, Form> work(model, forward.num_tokens, forward.num_wanted,
                                     forward.max_entries, forward.num_threads, forward.workspace);
  const std::vector<View> views = views_of(model, forward);
  return Entry::of_this_process().run(forward.workspace, forward.num_threads, [&](Member me) {
    Worker<Weight, Form>(model, forward, work, views, me).run();
  });
}

bool attends_in_floats(const ForedraftModel& model) {
  return model.attention_cap != 0 ||
         std::any_of(model.windows, model.windows + model.num_views, [](int64_t size) { return size; });
}

// Calls work(type of the embeddings, form of the other matrices).
template <class Work>
auto with_types(const ForedraftModel& model, const Work& work) {
  const auto in_type = [&](auto weight) {
    return with_form<decltype(weight)>(model.form, attends_in_floats(model),
                                       [&](auto form) { return work(weight, form); });
  };
  return model.is_bf16 ? in_type(bf16{}) : in_type(float{});
}

}  // namespace

extern "C" {

__attribute__((visibility("default")))
void foredraft_use_huge_pages(void* begin, int64_t size) { use_huge_pages(begin, size); }

// Whether bfloat16 weights are best multiplied on tiles here.
__attribute__((visibility("default")))
int64_t foredraft_has_tiles() { return tiles_allowed(); }

// Floats of work memory that a forward of this size needs.
__attribute__((visibility("default")))
int64_t foredraft_workspace_size(const ForedraftModel* model, int64_t num_tokens,
                                 int64_t num_wanted, int64_t max_entries, int64_t num_threads) {
  return with_types(*model, [&](auto weight, auto form) {
    return Workspace<decltype(weight), decltype(form)>(*model, num_tokens, num_wanted, max_entries,
                                                       num_threads, nullptr).size;
  });
}

// Returns an Outcome. Unless it is kDone, nothing was computed.
__attribute__((visibility("default")))
int64_t foredraft_forward(const ForedraftModel* model, const ForedraftForward* forward) {
  if (forward->num_threads < 1 || forward->num_threads > kMostThreads) return kNoThreads;
  return with_types(*model, [&](auto weight, auto form) {
    return run<decltype(weight), decltype(form)>(*model, *forward);
  });
}

}  // extern "C"
