// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_tensors.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct LsFlags {
  std::string step;
  std::string store;
  TensorChoice choice;
  bool json = false;
};

void PrintTensors(const nlohmann::json& tensors) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "KIND", "SHAPE", "DTYPE", "BYTES", "HELD BY"}};
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) {
    const std::string optimizer = tensor.value("optimizer", "");
    bytes += tensor.value("bytes", uint64_t{0});
    rows.push_back(
        {Printable(tensor.value("name", "")),
         Printable(StrCat(optimizer, optimizer.empty() ? "" : ".", tensor.value("kind", ""))),
         ShapeText(tensor["shape"].get<std::vector<uint64_t>>()), tensor.value("dtype", ""),
         HumanBytes(tensor.value("bytes", uint64_t{0})), Printable(HolderText(tensor["held_by"]))});
  }
  PrintColumns(rows, "llllrl");
  fmt::print("{}, {}\n", Counted(tensors.size(), "tensor"), HumanBytes(bytes));
}

Status RunLs(const LsFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(options.step, options.store, {}));
  const StepModel& model = step->model;
  CKPT_ASSIGN_OR_RETURN(const auto atoms, ChooseAtoms(model, options.choice));
  nlohmann::json tensors = nlohmann::json::array();
  for (const AtomIndex index : atoms) {
    const Atom& atom = model.atom(index);
    tensors.push_back(AtomJson(model, atom));
    tensors.back()["held_by"] = HolderJson(model, atom);
  }
  if (options.json) {
    PrintJson({{"layout", model.layout.ToString()}, {"tensors", tensors}});
  } else {
    PrintTensors(tensors);
  }
  return {};
}

}  // namespace

void AddLsCommand(CommandSet& commands) {
  auto options = std::make_shared<LsFlags>();
  Command& command =
      commands.Add("ls", "List a step's tensors: shape, dtype, bytes, and who holds them");
  command.Add("STEP", options->step, "RUN/ID, RUN, or a checkpoint's path")
      .Required()
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  AddTensorChoice(command, options->choice);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunLs(*options); };
}

}  // namespace ckptfs
