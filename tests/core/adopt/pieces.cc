// SPDX-License-Identifier: Apache-2.0

#include "tests/core/adopt/pieces.h"

#include <sys/stat.h>
#include <unistd.h>

#include "core/base/strings.h"
#include "core/blob/blob_reader.h"
#include "core/io/file_stamp.h"
#include "core/view/plan_reader.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs::testing_support {

std::string Pieces::Truth(const StepModel& model, AtomIndex atom) {
  const Atom& described = model.atom(atom);
  std::string bytes(ByteCount(described.shape, described.dtype).value_or(0), '\0');
  for (uint64_t b = 0; b < bytes.size(); ++b) {
    bytes[b] = static_cast<char>(static_cast<uint32_t>(atom) * 37 + b * 11 + b / 256);
  }
  return bytes;
}

AtomIndex Pieces::Add(const std::string& name, const std::string& kind, uint64_t elements,
                      DType dtype, uint64_t gap) {
  const AtomIndex index{static_cast<uint32_t>(model_.atoms.size())};
  if (!model_.FindParameter(name)) {
    model_.parameters.emplace_back();
    model_.parameters.back().name = name;
    model_.parameters.back().shape = {elements};
  }
  const uint64_t share = (elements + kRanks - 1) / kRanks;
  Atom atom;
  atom.parameter = *model_.FindParameter(name);
  atom.kind = kind;
  atom.dtype = dtype;
  atom.shape = {elements};
  LocalTensor local = WholeTensor(atom.shape);
  local.shape = {share * kRanks};
  FragmentSeries series;
  series.count = kRanks;
  series.flat_step = series.elements = share;
  series.blob_step = 1;
  series.offset = files_[0].size() + gap;
  series.dtype = dtype;
  atom.source.gathers = {Gather{{local}, {series}}};
  model_.atoms.push_back(atom);
  std::string bytes = Truth(model_, index);
  bytes.resize(share * kRanks * ByteWidth(dtype), '~');  // padding
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const uint64_t length = share * ByteWidth(dtype);
    files_[rank].append(gap, '#');
    files_[rank].append(bytes, rank * length, length);
  }
  return index;
}

void Pieces::Write() {
  model_.id = "step1";
  model_.roots = {directory_.path()};
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Blob blob;
    blob.path = StrCat("rank", rank);
    directory_.Write(blob.path, files_[rank]);
    Restrict(rank, 0640);
    if (geteuid() == 0) (void)!chown(PathOf(rank).c_str(), 1000, 100);
    struct stat status {};
    stat(PathOf(rank).c_str(), &status);
    blob.stamp = StampOf(status);
    blob.mode = 0640;
    blob.uid = status.st_uid;
    blob.gid = status.st_gid;
    model_.blobs.push_back(blob);
  }
  model_.BuildIndex();
}

void Pieces::Restrict(uint32_t rank, uint32_t mode) {
  chmod(PathOf(rank).c_str(), mode);
  if (rank >= model_.blobs.size()) return;
  model_.blobs[rank].mode = mode;
  model_.blobs[rank].stamp = *StampOfFile(PathOf(rank));
}

std::string ReadWhole(const StepModel& model, AtomIndex atom) {
  const Atom& described = model.atom(atom);
  PlanBuilder builder;
  builder.Atom(atom, std::make_shared<const LocalTensor>(WholeTensor(described.shape)), 0,
               ElementCount(described.shape).value_or(0), described.dtype);
  const Plan plan = std::move(builder).Finish();
  const auto blobs = BlobReader::Create(model, {});
  std::string bytes(plan.size(), '?');
  const auto read =
      PlanReader(plan, model, *blobs).Read(0, std::as_writable_bytes(std::span(bytes)));
  return read ? bytes : std::string(ErrorCodeName(read.error().code));
}

}  // namespace ckptfs::testing_support
