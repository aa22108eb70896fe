// SPDX-License-Identifier: Apache-2.0
//
// publish_bench [DIRECTORY]: what the 10th and the 1,000th step of a store cost to
// publish, and a mount to take in.  Each step is published as `ckptfs adopt` does:
// the store is opened, the manifest rendered, looked for, published; and taken in by
// a whole Filesystem, all of a mount but FUSE.  Prints medians over 11 steps around
// each, of the time and of all threads' processor time, in microseconds:
//
//   publish <10th> <1000th> <10th's processor time> <1000th's>
//   refresh <10th> <1000th> <10th's processor time> <1000th's>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/store/step_catalogue.h"
#include "core/store/store.h"
#include "fs/filesystem.h"

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

struct Cost {
  double time = 0;       // microseconds
  double processor = 0;  // of all threads
};

double ProcessorTime() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

template <class Call>
Cost CostOf(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  const double processor = ProcessorTime();
  call();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  return {took.count(), ProcessorTime() - processor};
}

void Must(const Status& status) {
  if (status) return;
  fprintf(stderr, "publish_bench: %s\n", status.error().message.c_str());
  exit(1);
}

// A store with a mount of it, into which steps are published.
class Bench {
 public:
  explicit Bench(const std::string& directory)
      : directory_(directory),
        live_(Must(Store::Open(directory, true))),
        catalogue_(*live_),
        mounted_(Must(Filesystem::Create(catalogue_, {}, Options()))) {}

  // Publishes one more step; what that and the taking in of it cost.
  std::pair<Cost, Cost> Step() {
    const StepModel model = MakeModel(++steps_);
    const Cost publish = CostOf([&] {
      const auto store = Must(Store::Open(directory_, false));
      const RenderedStep rendered = Must(store->Render(model));
      if (Must(store->FindPublished("run", model.id, rendered))) exit(1);
      Must(store->Publish("run", model, rendered, StrCat("/checkpoints/run/", model.id),
                          "/checkpoints/run"));
    });
    const Cost refresh = CostOf([&] { Must(mounted_->RefreshStep("run", model.id)); });
    const auto shown = mounted_->ViewShows();
    if (!shown || shown->id != model.id) exit(1);
    return {publish, refresh};
  }

 private:
  // As a mount that follows, whose kernel forgets a name at once.
  static FilesystemOptions Options() {
    FilesystemOptions options;
    options.follow = true;
    options.invalidate = [](InodeNumber, const std::string&) {};
    return options;
  }

  std::string directory_;
  std::unique_ptr<Store> live_;
  StepCatalogue catalogue_;
  std::unique_ptr<Filesystem> mounted_;
  int steps_ = 0;
};

double Median(std::vector<Cost> costs, double Cost::*of) {
  const auto middle = costs.begin() + static_cast<ptrdiff_t>(costs.size() / 2);
  std::nth_element(costs.begin(), middle, costs.end(),
                   [&](const Cost& a, const Cost& b) { return a.*of < b.*of; });
  return *middle.*of;
}

void Print(const char* what, const std::vector<Cost> (&costs)[2]) {
  printf("%s %.0f %.0f %.0f %.0f\n", what, Median(costs[0], &Cost::time),
         Median(costs[1], &Cost::time), Median(costs[0], &Cost::processor),
         Median(costs[1], &Cost::processor));
}

// The 10th and the 1,000th step and those around them, in turns: a machine does
// not run at one speed for as long as 1,000 steps take.
void Run(const std::string& directory) {
  Bench few(directory + "/few");
  Bench many(directory + "/many");
  for (int i = 1; i < 10 - kAround; ++i) few.Step();
  for (int i = 1; i < 1000 - kAround; ++i) many.Step();
  std::vector<Cost> publish[2], refresh[2];
  for (int i = 0; i < 2 * kAround + 1; ++i) {
    for (const int which : {0, 1}) {
      const auto [published, refreshed] = (which == 0 ? few : many).Step();
      publish[which].push_back(published);
      refresh[which].push_back(refreshed);
    }
  }
  Print("publish", publish);
  Print("refresh", refresh);
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
