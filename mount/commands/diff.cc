// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/inspect/tensor_diff.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_tensors.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct DiffFlags {
  std::string a;
  std::string b;
  std::string store;
  TensorChoice choice;
  std::string absolute;
  std::string relative;
  std::vector<std::string> roots;
  unsigned threads = 0;
  bool json = false;
};

Result<double> ParseTolerance(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0' && value >= 0 && std::isfinite(value)) return value;
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "' is not a number from 0 on, such as 1e-6"));
}

// True if a tensor counts as different: by its bits, or beyond the tolerance.
bool Differs(const AtomDiff& diff, bool tolerant) {
  switch (diff.kind) {
    case AtomDiff::Kind::kSame: return false;
    case AtomDiff::Kind::kChanged:
    case AtomDiff::Kind::kRetyped: return !tolerant || diff.values.beyond > 0;
    default: return true;
  }
}

Json SideJson(const StepModel& model, const std::optional<AtomIndex>& index) {
  if (!index) return nullptr;
  const Atom& atom = model.atom(*index);
  return {{"shape", std::vector<uint64_t>(atom.shape.begin(), atom.shape.end())},
          {"dtype", std::string(DTypeName(atom.dtype))}};
}

Json DiffJson(const AtomDiff& diff, const StepModel& a, const StepModel& b) {
  Json json = {{"name", diff.name},           {"kind", diff.atom_kind},
               {"optimizer", diff.optimizer}, {"change", std::string(AtomDiffName(diff.kind))},
               {"a", SideJson(a, diff.a)},    {"b", SideJson(b, diff.b)}};
  const bool compared =
      diff.kind == AtomDiff::Kind::kChanged || diff.kind == AtomDiff::Kind::kRetyped;
  if (!compared) return json;
  json["elements"] = diff.values.elements;
  json["different_bits"] = diff.values.bits;
  json["different_values"] = diff.values.values;
  json["beyond_tolerance"] = diff.values.beyond;
  json["first"] = nullptr;
  if (diff.values.first) json["first"] = *diff.values.first;
  json["max_abs"] = static_cast<double>(diff.values.max_abs);
  json["max_rel"] = static_cast<double>(diff.values.max_rel);
  return json;
}

std::string ChangeText(const Json& change) {
  const std::string kind = change.value("change", "");
  const auto side = [&](const char* key) {
    const Json& one = change[key];
    return one.is_null() ? std::string()
                         : StrCat(one.value("dtype", ""), " ",
                                  ShapeText(one["shape"].get<std::vector<uint64_t>>()));
  };
  if (kind == "added") return side("b");
  if (kind == "removed") return side("a");
  if (kind == "reshaped") return StrCat(side("a"), " -> ", side("b"));
  std::string text = kind == "retyped" ? StrCat(side("a"), " -> ", side("b"), "; ") : "";
  const auto values = change.value("different_values", uint64_t{0});
  text += StrCat(change.value("different_bits", uint64_t{0}), " of ",
                 change.value("elements", uint64_t{0}), " elements differ");
  if (values == 0) return text + " in bits alone (signs of zero, kinds of NaN)";
  return text + fmt::format("; by {:.3g} at most, relatively {:.3g}; first at {}",
                            change.value("max_abs", 0.0), change.value("max_rel", 0.0),
                            change.value("first", uint64_t{0}));
}

void PrintDiff(const Json& changes, size_t same, size_t excused) {
  for (const Json& change : changes) {
    fmt::print("{:<9} {} {}: {}\n", change.value("change", ""), Printable(change.value("name", "")),
               Printable(change.value("kind", "")), ChangeText(change));
  }
  fmt::print("{} {}, {} {} the same{}\n", Counted(changes.size(), "tensor"),
             changes.size() == 1 ? "differs" : "differ", same, same == 1 ? "is" : "are",
             excused == 0 ? "" : StrCat(", ", excused, " within the tolerance"));
}

Status RunDiff(const DiffFlags& options) {
  Tolerance tolerance;
  const bool tolerant = !options.absolute.empty() || !options.relative.empty();
  if (!options.absolute.empty()) {
    CKPT_ASSIGN_OR_RETURN(tolerance.absolute, ParseTolerance(options.absolute));
  }
  if (!options.relative.empty()) {
    CKPT_ASSIGN_OR_RETURN(tolerance.relative, ParseTolerance(options.relative));
  }
  CKPT_ASSIGN_OR_RETURN(const auto a, LoadSubject(options.a, options.store, {}));
  CKPT_ASSIGN_OR_RETURN(const auto b, LoadSubject(options.b, options.store, {}));
  CKPT_ASSIGN_OR_RETURN(const RootMap roots, ParseRoots(options.roots));
  const auto a_blobs = BlobReader::Create(a->model, ReaderOptions(roots));
  const auto b_blobs = BlobReader::Create(b->model, ReaderOptions(roots));
  JobOptions job;
  job.threads = options.threads;
  job.progress = ProgressBar("diff");
  CKPT_ASSIGN_OR_RETURN(const auto diffs,
                        DiffSteps({&a->model, a_blobs.get()}, {&b->model, b_blobs.get()}, tolerance,
                                  job, [&](const std::string& name, const std::string& kind) {
                                    return Chooses(options.choice, name, kind);
                                  }));
  if (diffs.empty()) {
    CKPT_RETURN_IF_ERROR(ChooseAtoms(a->model, options.choice));
    CKPT_RETURN_IF_ERROR(ChooseAtoms(b->model, options.choice));
  }
  Json changes = Json::array();
  size_t same = 0, excused = 0;
  for (const AtomDiff& diff : diffs) {
    if (diff.kind == AtomDiff::Kind::kSame) {
      ++same;
    } else if (!Differs(diff, tolerant)) {
      ++excused;
    } else {
      changes.push_back(DiffJson(diff, a->model, b->model));
    }
  }
  if (options.json) {
    PrintJson({{"changes", changes}, {"same", same}, {"within_tolerance", excused}});
  } else {
    PrintDiff(changes, same, excused);
  }
  return ExitWith(changes.empty() ? 0 : static_cast<int>(ExitCode::kDataLoss));
}

}  // namespace

void AddDiffCommand(CommandSet& commands) {
  auto options = std::make_shared<DiffFlags>();
  Command& command = commands.Add("diff",
                                  "Show how two steps differ: tensors, shapes, and values "
                                  "by how much");
  const unsigned offered = kOfferSteps | kOfferRuns | kOfferFiles;
  command.Add("STEP", options->a, "RUN/ID, RUN, or a checkpoint's path").Required().Offers(offered);
  command.Add("OTHER", options->b, "The other one").Required().Offers(offered);
  AddTensorChoice(command, options->choice);
  command
      .Add("--atol", options->absolute,
           "Excuse values that differ by at most this (default: "
           "bits are compared)")
      .Value("X")
      .Check(Checked(ParseTolerance));
  command.Add("--rtol", options->relative, "The same, relative to the other step's value")
      .Value("X")
      .Check(Checked(ParseTolerance));
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  AddThreadsOption(command, options->threads, "Threads that read");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunDiff(*options); };
}

}  // namespace ckptfs
