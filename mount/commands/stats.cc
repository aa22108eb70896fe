// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/inspect/tensor_stats.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_tensors.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct StatsFlags {
  std::string step;
  std::string store;
  TensorChoice choice;
  std::vector<std::string> roots;
  unsigned threads = 0;
  bool json = false;
};

bool IsWholeNumber(DType dtype) { return dtype >= DType::kI64 && dtype <= DType::kBool; }

// Integers as such, so that no digit of 64 bits is lost.
nlohmann::json NumberJson(WideNumber value, DType dtype) {
  if (!IsWholeNumber(dtype)) return static_cast<double>(value);
  if (value < 0) return static_cast<int64_t>(value);
  return static_cast<uint64_t>(value);
}

nlohmann::json StatsJson(const TensorStats& stats, DType dtype) {
  nlohmann::json json = {{"elements", stats.elements}};
  for (const char* key : {"min", "max", "mean", "std", "zeros", "nan", "infinite"})
    json[key] = nullptr;
  if (!stats.numbers) return json;
  json["zeros"] = stats.zeros;
  json["nan"] = stats.nan;
  json["infinite"] = stats.infinite;
  if (stats.finite == 0) return json;
  json["min"] = NumberJson(stats.min, dtype);
  json["max"] = NumberJson(stats.max, dtype);
  json["mean"] = static_cast<double>(stats.mean);
  json["std"] = static_cast<double>(stats.Std());
  return json;
}

std::string NumberText(const nlohmann::json& value) {
  if (value.is_null()) return "-";
  if (value.is_number_float()) return fmt::format("{:.6g}", value.get<double>());
  return value.dump();
}

void PrintStats(const nlohmann::json& tensors) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "KIND", "DTYPE", "ELEMENTS", "MIN", "MAX", "MEAN", "STD", "ZEROS", "NAN", "INF"}};
  for (const auto& tensor : tensors) {
    std::vector<std::string> row = {Printable(tensor.value("name", "")),
                                    Printable(tensor.value("kind", "")), tensor.value("dtype", "")};
    for (const char* key : {"elements", "min", "max", "mean", "std", "zeros", "nan", "infinite"}) {
      row.push_back(NumberText(tensor[key]));
    }
    rows.push_back(std::move(row));
  }
  PrintColumns(rows, "lllrrrrrrrr");
}

Status RunStats(const StatsFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(options.step, options.store, {}));
  const StepModel& model = step->model;
  CKPT_ASSIGN_OR_RETURN(const auto atoms, ChooseAtoms(model, options.choice));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  const auto blobs = BlobReader::Create(model, ReaderOptions(std::move(roots)));
  JobOptions job;
  job.threads = options.threads;
  job.progress = ProgressBar("stats");
  CKPT_ASSIGN_OR_RETURN(const auto stats, StatsOfAtoms(model, *blobs, atoms, job));
  nlohmann::json tensors = nlohmann::json::array();
  for (size_t i = 0; i < atoms.size(); ++i) {
    const Atom& atom = model.atom(atoms[i]);
    tensors.push_back(AtomJson(model, atom));
    tensors.back().update(StatsJson(stats[i], atom.dtype));
  }
  if (options.json) {
    PrintJson({{"tensors", tensors}});
  } else {
    PrintStats(tensors);
  }
  return {};
}

}  // namespace

void AddStatsCommand(CommandSet& commands) {
  auto options = std::make_shared<StatsFlags>();
  Command& command =
      commands.Add("stats",
                   "Show least, greatest and mean values of a step's tensors, zeros, NaN "
                   "and infinity");
  command.Add("STEP", options->step, "RUN/ID, RUN, or a checkpoint's path")
      .Required()
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  AddTensorChoice(command, options->choice);
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  AddThreadsOption(command, options->threads, "Threads that read");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunStats(*options); };
}

}  // namespace ckptfs
