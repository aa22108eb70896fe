// SPDX-License-Identifier: Apache-2.0

#include "core/model/read_blobs.h"

#include <algorithm>
#include <utility>

#include "core/model/side_blob.h"
#include "core/model/step_notes.h"

namespace ckptfs {

std::vector<uint8_t> FindReadBlobs(const StepModel& model) {
  std::vector<uint8_t> read(model.blobs.size(), 0);
  for (const Atom& atom : model.atoms) {
    for (const Gather& gather : atom.source.gathers) {
      for (const FragmentSeries& series : gather.series) {
        for (uint32_t k = 0; k < series.count; ++k) {
          read[static_cast<uint32_t>(series.At(k).blob)] = 1;
        }
      }
    }
  }
  for (const Document& document : model.documents) {
    for (const StoredTensor& tensor : document.tensors) {
      if (!tensor.atom) read[static_cast<uint32_t>(tensor.blob)] = 1;
    }
  }
  return read;
}

StepIdentity IdentityOf(const StepModel& model) {
  CKPT_CHECK(!FindSideBlob(model));
  std::vector<uint8_t> read = FindReadBlobs(model);
  while (!read.empty() && read.back() == 0) read.pop_back();  // sources list such files last
  StepIdentity out;
  out.blobs.assign(model.blobs.begin(), model.blobs.begin() + static_cast<ptrdiff_t>(read.size()));
  out.notes = model.notes;
  std::erase_if(out.notes, [](const std::string& note) {
    return note.starts_with(kNotShownNote) || note.starts_with(kTimesNote);
  });
  out.mtime_ns = model.mtime_ns;
  int64_t newest = 0;
  for (size_t i = 0; i < read.size(); ++i) {
    Blob& blob = out.blobs[i];
    blob.mode = blob.uid = blob.gid = 0;
    blob.stamp.ctime_ns = 0;
    blob.frame = Digest{};  // manifests of before do not have it
    if (read[i] != 0) {
      newest = std::max(newest, blob.stamp.mtime_ns);
      continue;
    }
    blob.stamp = BlobStamp{};
    blob.fingerprint = blob.content = Digest{};
  }
  if (newest != 0) out.mtime_ns = newest;
  return out;
}

}  // namespace ckptfs
