// SPDX-License-Identifier: Apache-2.0
//
// view_tool SOURCE LAYOUT FORMAT DEST [PREFIX]: index a checkpoint and write
// every file of one view (below PREFIX, if given) to a directory, without a
// mount.  For tests that hand views to real frameworks.  SOURCE "tiny" is the
// made-up step of tiny_step.h.

#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/blob/blob_reader.h"
#include "core/view/plan_reader.h"
#include "core/view/view_format.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

constexpr size_t kBuffer = 8 << 20;

Status WriteFile(const View& view, const StepModel& step, BlobReader& blobs,
                 const std::string& path, uint64_t size, const std::string& to) {
  CKPT_ASSIGN_OR_RETURN(const Plan plan, view.MakePlan(path));
  if (plan.size() != size) {
    return Fail(ErrorCode::kInternal, StrCat(path, ": size ", size, ", plan ", plan.size()));
  }
  CKPT_RETURN_IF_ERROR(plan.Validate(step));
  const PlanReader reader(plan, step, blobs);
  std::ofstream out(to, std::ios::binary);
  std::vector<std::byte> buffer(kBuffer);
  for (uint64_t done = 0; done < size;) {
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(done, buffer));
    if (got == 0) return Fail(ErrorCode::kInternal, StrCat(path, " ends at ", done));
    out.write(reinterpret_cast<const char*>(buffer.data()), static_cast<std::streamsize>(got));
    done += got;
  }
  if (!out.flush()) return Fail(ErrorCode::kIo, StrCat("writing ", to));
  return {};
}

Status WriteTree(const View& view, const StepModel& step, BlobReader& blobs,
                 const std::string& directory, const std::string& prefix,
                 const std::string& destination) {
  CKPT_ASSIGN_OR_RETURN(const auto entries, view.List(directory));
  for (const ViewEntry& entry : entries) {
    const std::string path = directory.empty() ? entry.name : StrCat(directory, "/", entry.name);
    if (!path.starts_with(prefix) && !prefix.starts_with(path)) continue;
    const std::string to = StrCat(destination, "/", path);
    if (entry.type == ViewEntry::Type::kDirectory) {
      std::filesystem::create_directories(to);
      CKPT_RETURN_IF_ERROR(WriteTree(view, step, blobs, path, prefix, destination));
    } else if (entry.type == ViewEntry::Type::kSymlink) {
      std::filesystem::create_symlink(entry.target, to);
    } else {
      CKPT_RETURN_IF_ERROR(WriteFile(view, step, blobs, path, entry.size, to));
    }
  }
  return {};
}

Status WriteView(const std::shared_ptr<const StepModel>& step,
                 const std::vector<std::string>& arguments) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(arguments[1]));
  const auto blobs = BlobReader::Create(*step, BlobReader::Options{});
  for (const auto& format : MakeViewFormats()) {
    if (format->name() != arguments[2]) continue;
    CKPT_ASSIGN_OR_RETURN(const auto view, format->Open(ShownState::Of(step, layout)));
    return WriteTree(*view, *step, *blobs, "", arguments.size() > 4 ? arguments[4] : "",
                     arguments[3]);
  }
  return Fail(ErrorCode::kNotFound, StrCat("no view format '", arguments[2], "'"));
}

Status Run(const std::vector<std::string>& arguments) {
  if (arguments[0] == "tiny") {
    const TinyStep tiny(TinyStepOptions{});
    return WriteView(tiny.shared(), arguments);
  }
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  SourceOptions options;
  options.families = &families;
  const auto sources = MakeSources();
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(arguments[0]));
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest, IngestPlace(place, sources, options));
  if (ingest.steps.empty()) return Fail(ErrorCode::kNotFound, "no complete step");
  return WriteView(std::make_shared<const StepModel>(std::move(ingest.steps.back().model)),
                   arguments);
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 4) {
    std::fprintf(stderr, "view_tool SOURCE LAYOUT FORMAT DEST [PREFIX]\n");
    return 2;
  }
  const auto status = ckptfs::Run(arguments);
  if (!status) std::fprintf(stderr, "%s\n", status.error().message.c_str());
  return status ? 0 : 1;
}
