// SPDX-License-Identifier: Apache-2.0
//
// publish_bench [DIRECTORY]: what the 10th and the 1,000th step of a store cost to
// publish, and a mount to take in.  Each step is published as `ckptfs adopt` does:
// the store is opened, the manifest rendered, looked for, published.  Prints
// medians over 11 steps around each, in microseconds:
//
//   publish <10th> <1000th>
//   refresh <10th> <1000th>

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/store/store.h"

namespace ckptfs {
namespace {

constexpr int kAround = 5;

// 300 parameters in three states over 16 ranks: a manifest of a usual size.
StepModel MakeModel(int number) {
  StepModel model;
  model.framework = "bench";
  model.id = StrCat("global_step", number);
  model.iteration = static_cast<uint64_t>(number);
  model.mtime_ns = number;
  model.roots = {"/checkpoints/run"};
  for (int rank = 0; rank < 16; ++rank) {
    Blob blob;
    blob.path = StrCat(model.id, "/zero_pp_rank_", rank, "_mp_rank_00_optim_states.pt");
    blob.stamp = BlobStamp{uint64_t{1} << 30, 1 + number, 1, static_cast<uint64_t>(rank) + 1};
    model.blobs.push_back(std::move(blob));
  }
  const Shape shape = {16, 1024};
  for (uint32_t p = 0; p < 300; ++p) {
    Parameter parameter;
    parameter.name = StrCat("model.layers.", p / 9, ".weight", p % 9);
    parameter.shape = shape;
    model.parameters.push_back(std::move(parameter));
    for (const char* kind : {"master", "exp_avg", "exp_avg_sq"}) {
      Atom atom;
      atom.parameter = ParameterIndex{p};
      atom.kind = kind;
      atom.shape = shape;
      FragmentSeries series;
      series.count = 16;
      series.elements = series.flat_step = 1024;
      series.blob_step = 1;
      series.offset = uint64_t{p} * 4096;
      atom.source.gathers = {Gather{{WholeTensor(shape)}, {series}}};
      model.atoms.push_back(std::move(atom));
    }
  }
  return model;
}

template <class T>
T Must(Result<T> result) {
  if (result) return *std::move(result);
  fprintf(stderr, "publish_bench: %s\n", result.error().message.c_str());
  exit(1);
}

template <class Call>
double Microseconds(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

// A store with a daemon's view of it, into which steps are published.
class Bench {
 public:
  explicit Bench(const std::string& directory)
      : directory_(directory),
        live_(Must(Store::Open(directory, true))),
        generation_(Must(live_->News(0)).generation) {}

  // Publishes one more step; how long that and the taking in of it took.
  std::pair<double, double> Step() {
    const StepModel model = MakeModel(++steps_);
    const double publish = Microseconds([&] {
      const auto store = Must(Store::Open(directory_, false));
      const RenderedStep rendered = Must(store->Render(model));
      if (Must(store->FindPublished("run", model.id, rendered))) exit(1);
      Must(store->Publish("run", model, rendered, StrCat("/checkpoints/run/", model.id),
                          "/checkpoints/run"));
    });
    const double refresh = Microseconds([&] {
      if (!live_->RefreshStep("run", model.id)) exit(1);
      const StepNews news = Must(live_->News(generation_));
      if (news.all || news.changes.size() != 1) exit(1);
      generation_ = news.generation;
    });
    return {publish, refresh};
  }

 private:
  std::string directory_;
  std::unique_ptr<Store> live_;
  uint64_t generation_;
  int steps_ = 0;
};

double Median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// The 10th and the 1,000th step and those around them, in turns: a machine does
// not run at one speed for as long as 1,000 steps take.
void Run(const std::string& directory) {
  Bench few(directory + "/few");
  Bench many(directory + "/many");
  for (int i = 1; i < 10 - kAround; ++i) few.Step();
  for (int i = 1; i < 1000 - kAround; ++i) many.Step();
  std::vector<double> publish[2], refresh[2];
  for (int i = 0; i < 2 * kAround + 1; ++i) {
    for (const int which : {0, 1}) {
      const auto [published, refreshed] = (which == 0 ? few : many).Step();
      publish[which].push_back(published);
      refresh[which].push_back(refreshed);
    }
  }
  printf("publish %.0f %.0f\n", Median(publish[0]), Median(publish[1]));
  printf("refresh %.0f %.0f\n", Median(refresh[0]), Median(refresh[1]));
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) {
  std::string directory = argc > 1 ? argv[1] : std::filesystem::temp_directory_path().string();
  directory += "/publish_bench_XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) return 1;
  ckptfs::Run(directory);
  std::filesystem::remove_all(directory);
  return 0;
}
