// SPDX-License-Identifier: Apache-2.0
#include "core/model/name_normaliser.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(NameNormaliserTest, StripsWrappers) {
  EXPECT_EQ(NormaliseName("module.module.a.weight"), "a.weight");
  EXPECT_EQ(NormaliseName("_orig_mod.a.weight"), "a.weight");
  EXPECT_EQ(NormaliseName("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.c"), "a.b.c");
  EXPECT_EQ(NormaliseName("base_model.model.a.base_layer.weight"), "a.weight");
  EXPECT_EQ(NormaliseName("a.modules_to_save.default.weight"), "a.weight");
  EXPECT_EQ(NormaliseName("a.module.weight"), "a.module.weight");
  EXPECT_EQ(NormaliseName("module."), "module.");
  EXPECT_EQ(NormaliseName("my_orig_mod.weight"), "my_orig_mod.weight");
}

}  // namespace
}  // namespace ckptfs
