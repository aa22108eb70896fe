// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/commands/layout_map.h"
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

Result<bool> IsPng(const std::string& path) {
  if (path.ends_with(".png") || path.ends_with(".svg")) return path.ends_with(".png");
  return Fail(ErrorCode::kInvalid, StrCat("'", path, "': the name must end in .svg or .png"));
}

Status WritePicture(const std::string& path, const std::string& bytes) {
  const Descriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!out.valid()) return Fail(ErrnoError(errno, path));
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(out.get(), bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      Error error = ErrnoError(errno, path);
      struct stat made {};
      const bool file = ::fstat(out.get(), &made) == 0 && S_ISREG(made.st_mode);
      if (file) ::unlink(path.c_str());  // half a picture shows nothing
      return Fail(std::move(error));
    }
    at += static_cast<size_t>(n);
  }
  return {};
}

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
    CKPT_ASSIGN_OR_RETURN(const bool png, IsPng(options.output));
    const std::string name = step->record.run.empty() ? step->record.source
                                                      : StrCat(step->record.run, "/", step->record.id);
    const Picture picture =
        DrawMap(*map, StrCat(name, " as ", layout.ToString(), ": ", layout.World(), " ranks"));
    CKPT_RETURN_IF_ERROR(WritePicture(options.output, png ? picture.Png() : picture.Svg()));
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
  Command& command = commands.Add("map", "Draw which rank of a layout holds what: text, SVG or PNG");
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
