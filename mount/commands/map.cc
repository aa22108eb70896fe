// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/layout_map.h"
#include "mount/commands/picture_file.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct MapFlags {
  std::string layout;
  std::string step;
  std::string store;
  std::string output;
  bool json = false;
};

Status RunMap(const MapFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(options.layout));
  CKPT_ASSIGN_OR_RETURN(const std::string subject, OnlyStep(options.step, options.store));
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(subject, options.store, {}));
  auto map = MapLayout(step->model, layout);
  if (!map) {
    Error error = std::move(map).error().WithContext(StrCat("layout ", layout.ToString()));
    error.layout = layout.ToString();
    return Fail(std::move(error));
  }
  if (!options.output.empty()) {
    const std::string name = step->record.run.empty()
                                 ? step->record.source
                                 : StrCat(step->record.run, "/", step->record.id);
    const Picture picture =
        DrawMap(*map, StrCat(name, " as ", layout.ToString(), ": ", layout.World(), " ranks"));
    CKPT_RETURN_IF_ERROR(WritePicture(options.output, picture));
    if (!options.json) return {};
  }
  if (options.json) {
    PrintJson(MapJson(*map));
  } else {
    fmt::print("{}", MapText(*map));  // printable as it is
  }
  return {};
}

}  // namespace

void AddMapCommand(CommandSet& commands) {
  auto options = std::make_shared<MapFlags>();
  Command& command =
      commands.Add("map", "Draw which rank of a layout holds what: text, SVG or PNG");
  command.Add("LAYOUT", options->layout, "Such as tp2_pp2")
      .Required()
      .Offers(kOfferNothing)
      .Check(Checked(Layout::Parse));
  command.Add("--step", options->step, "The step, or a path (default: the only run's latest)")
      .Value("RUN/ID|PATH")
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  command.Add("--output", options->output, "Write a picture there instead of text")
      .Value("FILE.svg|FILE.png")
      .Check(Checked(IsPng));
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunMap(*options); };
}

}  // namespace ckptfs
